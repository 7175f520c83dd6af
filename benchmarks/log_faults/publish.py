"""The report of the log's fault lab."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.log_faults.designs import design_of

COMMAND = "python -m benchmarks.log_faults --publish FOLDER"
ALARMS = ("bug", "broken")

Outcomes = Sequence[dict[str, Any]]


def publish(outcomes: Outcomes, folder: Path) -> None:
    """Write `log-faults.md`."""
    clean = [outcome for outcome in outcomes if outcome["fault"] == "clean"]
    inside = [outcome for outcome in outcomes if outcome["fault"] != "clean" and not outcome["outside"]]
    outside = [outcome for outcome in outcomes if outcome["outside"]]
    held_out = [outcome for outcome in inside if _is_held_out(outcome)]
    hidden = [outcome for outcome in inside if outcome.get("is_hidden")]
    visible = [outcome for outcome in inside if not outcome.get("is_hidden")]
    lines = [
        "# Faults in logs",
        "",
        "Faults injected into one side of logs of real responses: the cause that `explain` named with the checkpoint",
        "at hand, and what `import` said without one. With a checkpoint a fault is named where the faulty side has its",
        "cause foremost and the other side is as declared.",
        "",
        f"- Named with the checkpoint: **{_share(inside)}**; of these on models and sizes on which no rule was chosen "
        f"**{_share(held_out)}**.",
        f"- Missed and hidden by rounding, so that no test of the log could be counted on to see it: {len(hidden)}. Of "
        f"the others named: **{_share(visible)}**.",
        f"- Clean logs accused: **{sum(not outcome['right'] for outcome in clean)} of {len(clean)}**, vLLM's side and "
        f"the training path's in each; without a checkpoint {_count(clean, _alarm('without_checkpoint'))}, with a "
        f"reference beside the columns {_count(clean, _alarm('with_reference'))}.",
        f"- Faults outside the list of hypotheses called unexplained: {_share(outside)}.",
        f"- Without a checkpoint: {_count(inside, _named('without_checkpoint'))} named, "
        f"{_count(inside, _alarm('without_checkpoint'))} called a bug or broken data by any name. With the same "
        f"policy's log-probs in FP32 as a column: {_count(inside, _named('with_reference'))} and "
        f"{_count(inside, _alarm('with_reference'))}.",
        "",
        f"Made by `{COMMAND}`, all rows by one state of the code: responses and mu by vLLM on the CPU, pi by the",
        "training path. Without a checkpoint nothing but what the two columns alone contradict can be named.",
        "",
        *_by_model(inside, clean),
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


def _by_model(outcomes: Outcomes, clean: Outcomes) -> Iterator[str]:
    """How many faults were tried on each model in each format: what a run that was cut short lacks is seen here."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome["model"], outcome["dtype"]].append(outcome)
    accused = {(each_outcome["model"], each_outcome["dtype"]) for each_outcome in clean if not each_outcome["right"]}
    yield from ("## Models", "", "| model | responses | dtype | named | clean log accused |", "|---|---|---|---|---|")
    for (model, dtype), of_model in rows.items():
        design = design_of(model)
        held_out = ", held out" if design.held_out else ""
        family = f" ({design.family})" if isinstance(design.family, str) and design.family != model else ""
        size = of_model[0].get("size") or f"{design.prompts} prompts x {design.samples}"
        answer = "yes" if (model, dtype) in accused else "no"
        yield f"| {model}{family}{held_out} | {size} | {dtype} | {_share(of_model)} | {answer} |"


def _table(outcomes: Outcomes, title: str) -> Iterator[str]:
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome["fault"], outcome["strength"]].append(outcome)
    yield from (
        f"## {title}",
        "",
        "| fault | strength | with a checkpoint | without | a bug by any name | with a reference | a bug by any name | "
        "evidence with the checkpoint, in one of them |",
        "|---|---|---|---|---|---|---|---|",
    )
    for (fault, strength), ones in rows.items():
        counts = [
            _count(ones, test(which)) for which in ("without_checkpoint", "with_reference") for test in (_named, _alarm)
        ]
        yield f"| {fault} | {strength} | {_share(ones)} | {' | '.join(counts)} | {ones[0]['evidence']} |"


def _missed(outcomes: Outcomes) -> list[str]:
    if not outcomes:
        return ["## Missed", "", "None."]
    return [
        "## Missed",
        "",
        "| model | dtype | fault | strength | side | named | evidence | the fault without rounding | hidden by it |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {outcome['model']} | {outcome['dtype']} | {outcome['fault']} | {outcome['strength']} | "
            f"{outcome['side']} | "
            f"{', '.join(outcome['codes'])}; other side {outcome['other_code']} | {outcome['evidence']} | "
            f"{outcome.get('limit', '')} | {'yes' if outcome.get('is_hidden') else ''} |"
            for outcome in outcomes
        ),
    ]


def _is_held_out(outcome: dict[str, Any]) -> bool:
    return design_of(outcome["model"]).held_out


def _named(which: str) -> Callable[[dict[str, Any]], bool]:
    """Whether `import` named the cause."""
    return lambda outcome: outcome[which][0] in ALARMS and outcome[which][1] in outcome["expected"]


def _alarm(which: str) -> Callable[[dict[str, Any]], bool]:
    return lambda outcome: outcome[which][0] in ALARMS


def _count(outcomes: Outcomes, test: Callable[[dict[str, Any]], bool]) -> str:
    return f"{sum(map(test, outcomes))} of {len(outcomes)}"


def _share(outcomes: Outcomes) -> str:
    return _count(outcomes, lambda outcome: bool(outcome["right"]))
