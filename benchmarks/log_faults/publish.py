"""The report of the log's fault lab."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMAND = "python -m benchmarks.log_faults --publish reports"


def publish(outcomes: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write `log-faults.md`."""
    clean = [outcome for outcome in outcomes if outcome["fault"] == "clean"]
    inside = [outcome for outcome in outcomes if outcome["fault"] != "clean" and not outcome["outside"]]
    outside = [outcome for outcome in outcomes if outcome["outside"]]
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
        *_by_model(inside),
        "",
        *_table(inside, "Faults"),
        "",
        *_table(outside, "Outside the list"),
        "",
        *_table(clean, "Clean logs"),
        "",
        *_missed([outcome for outcome in outcomes if not outcome["right"]]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log-faults.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _by_model(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """How many faults were tried on each model in each format: what a run that was cut short lacks is seen here."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome["model"], outcome["dtype"]].append(outcome)
    return [
        "## Models",
        "",
        "| model | dtype | named |",
        "|---|---|---|",
        *(f"| {model} | {dtype} | {_share(of_model)} |" for (model, dtype), of_model in rows.items()),
    ]


def _table(outcomes: Sequence[dict[str, Any]], title: str) -> list[str]:
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome["fault"], outcome["strength"]].append(outcome)
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
            f"| {outcome['model']} | {outcome['dtype']} | {outcome['fault']} | {outcome['strength']} | "
            f"{outcome['side']} | "
            f"{', '.join(outcome['codes'])}; other side {outcome['other_code']} | {outcome['evidence']} |"
            for outcome in outcomes
        ),
    ]


def _share(outcomes: Sequence[dict[str, Any]]) -> str:
    return f"{sum(outcome['right'] for outcome in outcomes)} of {len(outcomes)}"
