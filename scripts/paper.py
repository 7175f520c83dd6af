"""The tables of reports/paper from its records: `python -m scripts.paper FOLDER` writes FOLDER/tables.md."""

import sys
from pathlib import Path

from mismatch_probe.records.ablation import AblationResult
from mismatch_probe.records.manifest import read_document
from mismatch_probe.report.answers.ablate import ablation_answer
from mismatch_probe.report.markdown import markdown_table
from mismatch_probe.report.screen import in_full
from mismatch_probe.report.sections.ablation import ablation_tables

_GRIDS = ("precision", "conditions", "guarded", "shapes", "corrections", "sanity")


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
    return "\n\n".join(pieces) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "tables.md").write_text(tables_of(target), encoding="utf-8")
