"""The tables of reports/paper from its records: `python -m scripts.paper FOLDER` writes FOLDER/tables.md.

`python -m scripts.paper RUN OTHER ...` says whether ablations have the same numbers, and ends with 1 where they do not.
"""

import json
import sys
from pathlib import Path

from mismatch_probe.records.ablation import AblationResult
from mismatch_probe.records.manifest import read_document
from mismatch_probe.report.answers.ablate import ablation_answer
from mismatch_probe.report.markdown import markdown_table
from mismatch_probe.report.screen import in_full
from mismatch_probe.report.sections.ablation import ablation_tables
from mismatch_probe.report.view import Table

_GRIDS = ("precision", "conditions", "guarded", "slow", "shapes", "corrections", "sanity", "sanity-seeds", "smollm2")


def tables_of(folder: Path) -> str:
    """Every table of every record that is there, and on what it rests."""
    pieces = ["# Tables of the grids", "Made by `python -m scripts.paper reports/paper` from the records beside it."]
    for grid in _GRIDS:
        path = folder / f"{grid}.json"
        if not path.exists():
            continue
        result = read_document(path, AblationResult, missing="it was not run", fix="run the grid again")
        answer = ablation_answer(result)
        seeds = ", ".join(map(str, sorted({cell.seed for cell in result.cells})))
        pieces += [
            f"## {grid.capitalize()}",
            in_full(answer.headline),
            f"`{' '.join(result.command)}`, seeds {seeds}, mismatch-probe {result.tool_version}. {answer.footnote}",
        ]
        tables = [answer.table, *ablation_tables(result)]
        pieces += [
            "\n".join([f"**{table.caption}**", "", *markdown_table(table)]) for table in tables if table is not None
        ]
        pieces += [f"- {remark}" for remark in answer.remarks]
    moved = folder / "moved-weights.json"
    if moved.exists():
        pieces += ["## What rounding leaves of SmolLM2's updates", "\n".join(markdown_table(_moved_weights(moved)))]
    return "\n\n".join(pieces) + "\n"


def _moved_weights(record: Path) -> Table:
    """The table of the record that `scripts.moved_weights` writes."""
    columns = ("cell", "steps", "rounded to", "weights that moved", "of the change is there")
    return Table(
        "",
        columns,
        [
            (
                row["cell"],
                str(row["steps"]),
                row["rounded_to"],
                f"{row['moved'] / row['weights']:.1%} of {row['weights']:,}",
                f"{row['passed_on']:.1%}",
            )
            for row in json.loads(record.read_text(encoding="utf-8"))
        ],
    )


def numbers_of(run: Path) -> dict[tuple[str, int, str], str]:
    """Every number of an ablation, as it is written, by its cell, step and name, without what a clock says."""
    return {
        (path.parent.name, line["step"], name): json.dumps(value)
        for path in sorted(run.glob("cells/*/metrics.jsonl"))
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for name, value in line.items()
        if not name.startswith("time/")
    }


def differing_numbers(run: Path, other: Path) -> list[tuple[str, int, str]]:
    """Those that differ, or that one of the two lacks."""
    first, second = numbers_of(run), numbers_of(other)
    return sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))


if __name__ == "__main__":
    target, *others = map(Path, sys.argv[1:])
    if not others:
        (target / "tables.md").write_text(tables_of(target), encoding="utf-8")
    for other in others:
        differing = differing_numbers(target, other)
        steps = {key[:2] for key in numbers_of(target)}
        verdict = f"{len(differing)} differ, first {differing[0]}" if differing else "all the same"
        print(f"{target} and {other}: {len(numbers_of(target))} numbers of {len(steps)} steps, {verdict}")
    sys.exit(any(differing_numbers(target, other) for other in others))
