"""How many lines the package has, by kind: `python -m benchmarks.size [FOLDER]`.

A line is one of code, a docstring, an import, a comment or blank, and it counts once. A docstring is a text that stands
alone as a statement, of a module, class or function or below a field. JSON schemas are no Python and are not counted.
"""

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

KINDS = ("code", "docstrings", "blank", "imports", "comments")
PARTS = ("functions", "classes", "lines below fields", "lines of `Raises:`")
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


def parts_of(source: str) -> Counter[str]:
    """The number of functions and of classes in a module, and of the lines of its docstrings that document a field or
    stand in a section `Raises:`.
    """
    parts = Counter[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts["functions"] += 1
            case ast.ClassDef():
                parts["classes"] += 1
            case ast.Expr(value=ast.Constant(value=str(text))):
                parts["lines of `Raises:`"] += sum(len(part.splitlines()) for part in _RAISES.findall(text))
        for field, text_below in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            if isinstance(field, ast.AnnAssign | ast.Assign) and _is_text(text_below):
                parts["lines below fields"] += (text_below.end_lineno or text_below.lineno) - text_below.lineno + 1
    return parts


_RAISES: Final = re.compile(r"^ *Raises:(?:\n.*\S.*)*", re.MULTILINE)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def table(folder: Path) -> str:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    kinds = sum((kinds_of(source) for source in sources.values()), Counter[str]())
    parts = sum((parts_of(source) for source in sources.values()), Counter[str]())
    rooms = Counter[str]()
    for path, length in lengths.items():
        rooms[path.relative_to(folder).parts[0].removesuffix(".py")] += length
    largest = max(lengths, key=lambda path: lengths[path])
    rows = {
        "files": f"{len(sources):,}",
        "lines": f"{sum(lengths.values()):,}",
        **{f"lines: {kind}": f"{kinds[kind]:,}" for kind in KINDS},
        "median lines of a file": f"{statistics.median(lengths.values()):g}",
        "largest file": f"{lengths[largest]} (`{largest.relative_to(folder)}`)",
        f"files under {SHORT_LINES} lines": f"{sum(length < SHORT_LINES for length in lengths.values())}",
        f"files over {MOST_LINES} lines": f"{sum(length > MOST_LINES for length in lengths.values())}",
        **{part: f"{parts[part]:,}" for part in PARTS},
        **{f"lines of `{room}`": f"{number:,}" for room, number in rooms.most_common()},
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {number} |" for what, number in rows.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("mismatch_probe"))
    print(table(parser.parse_args().folder))


if __name__ == "__main__":
    main()
