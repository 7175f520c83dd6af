"""How many lines the package has, by kind: `python -m benchmarks.size [FOLDER]`.

A line is one of code, a docstring, an import, a comment or blank, and it counts once. A docstring is a text that stands
alone as a statement, of a module, class or function or below a field. JSON schemas are no Python and are not counted.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KINDS = ("code", "docstrings", "blank", "imports", "comments")
SHORT_LINES = 60
MOST_LINES = 400


def kinds_of(source: str) -> Counter[str]:
    """The number of lines of each kind in a module."""
    lines = source.splitlines()
    kinds = ["code" if line.strip() else "blank" for line in lines]
    for number in _comment_lines(source):
        kinds[number - 1] = "comments"
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                kind = "docstrings"
            case ast.Import() | ast.ImportFrom():
                kind = "imports"
            case _:
                continue
        end = node.end_lineno or node.lineno
        kinds[node.lineno - 1 : end] = [kind] * (end - node.lineno + 1)
    return Counter(kinds)


def _comment_lines(source: str) -> Iterator[int]:
    """The lines that hold nothing but a comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            yield token.start[0]


def table(folder: Path) -> str:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    kinds = sum((kinds_of(source) for source in sources.values()), Counter[str]())
    largest = max(lengths, key=lambda path: lengths[path])
    rows = {
        "files": f"{len(sources):,}",
        "lines": f"{sum(lengths.values()):,}",
        **{f"lines: {kind}": f"{kinds[kind]:,}" for kind in KINDS},
        "median lines of a file": f"{statistics.median(lengths.values()):g}",
        "largest file": f"{lengths[largest]} (`{largest.relative_to(folder)}`)",
        f"files under {SHORT_LINES} lines": f"{sum(length < SHORT_LINES for length in lengths.values())}",
        f"files over {MOST_LINES} lines": f"{sum(length > MOST_LINES for length in lengths.values())}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {number} |" for what, number in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("mismatch_probe"))
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
