"""The report of the log's fault lab."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = "python -m benchmarks.log_faults --publish reports"


def publish(outcomes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write `log-faults.md`."""
    clean = [one for one in outcomes if one["fault"] == "clean"]
    inside = [one for one in outcomes if one["fault"] != "clean" and not one["outside"]]
    outside = [one for one in outcomes if one["outside"]]
    lines = [
        "# Faults in logs",
        "",
        "Faults injected into one side of logs of real responses, and the cause that the explanation named with the",
        "checkpoint at hand. A fault is named where the faulty side has its cause foremost and the other side is as",
        "declared.",
        "",
        f"- Named: **{_share(inside)}**.",
        f"- Clean logs accused: **{sum(not one['right'] for one in clean)} of {len(clean)}**, vLLM's side and the "
        "training path's in each.",
        f"- Faults outside the list of hypotheses called unexplained: {_share(outside)}.",
        "",
        f"Made by `{COMMAND}`: responses and mu by vLLM on the CPU, pi by the training path.",
        "",
        *_table(inside, "Faults"),
        "",
        *_table(outside, "Outside the list"),
        "",
        *_table(clean, "Clean logs"),
        "",
        *_missed([one for one in outcomes if not one["right"]]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log-faults.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(outcomes: Sequence[dict[str, Any]], title: str) -> list[str]:
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in outcomes:
        rows[one["fault"], one["strength"]].append(one)
    return [
        f"## {title}",
        "",
        "| fault | strength | named | evidence, in one of them |",
        "|---|---|---|---|",
        *(
            f"| {fault} | {strength} | {_share(ones)} | {ones[0]['evidence']} |"
            for (fault, strength), ones in rows.items()
        ),
    ]


def _missed(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    if not outcomes:
        return ["## Missed", "", "None."]
    return [
        "## Missed",
        "",
        "| model | dtype | fault | strength | side | named | evidence |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {one['model']} | {one['dtype']} | {one['fault']} | {one['strength']} | {one['side']} | "
            f"{', '.join(one['codes'])}; other side {one['other_code']} | {one['evidence']} |"
            for one in outcomes
        ),
    ]


def _share(outcomes: Sequence[dict[str, Any]]) -> str:
    return f"{sum(one['right'] for one in outcomes)} of {len(outcomes)}"
