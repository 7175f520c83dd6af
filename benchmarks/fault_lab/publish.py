"""The lab's report: tables that a person reads, and every outcome as JSON.

Models that the folder's report has and this run has not stay in it, with the day on which they were judged.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks.fault_lab.models import HELD_OUT, MODELS
from benchmarks.fault_lab.scoring import CleanOutcome, Outcome, as_json, read_clean_outcome, read_outcome

NOT_A_BUG = ("clean", "precision", "routing")
NAMES_NO_CAUSE = ("unexplained", "beyond_format")

NOT_INJECTED = """## Not injected

- Chunked prefill, prefix cache, cascade attention, speculative decoding, stale prefix cache, sleep and wake: the engine
  at hand is right there, and nothing outside it can make it wrong. The signature (decode against its own prefill) is
  tested on simulated data.
- Raw instead of processed log-probs, penalties, double BOS in the ids: the product fixes or passes on these, and its
  preflight names them; tested on settings.
- A clean mixture of experts under torch.autocast, which leaves the experts' grouped products in FP32: the verdict says
  so (`dtype_not_applied`).
- Faults that need an accelerator: FP8 caches, TF32, tensor parallelism."""


def publish(outcomes: list[Outcome], clean: list[CleanOutcome], folder: Path) -> None:
    """Write `fault-lab.md` and `fault-lab.json`. Rows of either that were not judged now stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fault-lab.json"
    models = {*(outcome.model for outcome in clean), *(outcome.model for outcome in outcomes)}
    judged = {model: date.today().isoformat() for model in sorted(models)}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        earlier_clean, earlier = map(read_clean_outcome, before["clean"]), map(read_outcome, before["faults"])
        clean = list({(item.model, item.variant, item.pair): item for item in (*earlier_clean, *clean)}.values())
        outcomes = list(
            {(item.model, item.where, item.fault, item.strength): item for item in (*earlier, *outcomes)}.values()
        )
        judged = before["judged"] | judged
    outcomes.sort(key=lambda outcome: _place(outcome.model))
    clean.sort(key=lambda outcome: _place(outcome.model))
    record = {"judged": judged, "clean": as_json(clean), "faults": as_json(outcomes)}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    parts = (
        _summary(outcomes, clean, sorted(judged, key=_place)),
        _models(outcomes, clean, judged),
        _clean(clean),
        _faults(outcomes),
        _matrix(outcomes),
        _misses(outcomes),
        NOT_INJECTED,
    )
    (folder / "fault-lab.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _place(model: str) -> tuple[int, str]:
    return (MODELS.index(model), "") if model in MODELS else (len(MODELS), model)


def _command(models: Sequence[str]) -> str:
    """What makes the report, without this machine's folders."""
    names = "" if tuple(models) == MODELS else f" --models {' '.join(models)}"
    return f"python -m benchmarks.fault_lab{names} --publish FOLDER"


def _summary(outcomes: list[Outcome], clean: list[CleanOutcome], models: Sequence[str]) -> str:
    usual = [outcome for outcome in outcomes if outcome.usual]
    accused = sum(outcome.is_accused for outcome in clean)
    lines = [
        "# Fault lab",
        "",
        "Faults injected into real runs (vLLM against the training path), and the cause that the verdict named.",
        "",
        f"- Named correctly at the strengths a user would meet: **{_named(usual)}**; at all strengths, the weakest "
        f"included: {_named(outcomes)}.",
        *_held_out(usual),
        "- From the data alone, the settings of both sides hidden: "
        f"{_share(_is_right(outcome.alone.code, outcome) for outcome in usual)}; without the FP32 pair as well: "
        f"{_share(_is_right(outcome.sixteen_bit.code, outcome) for outcome in usual)}, the rest undecided.",
        "- A wrong cause named, where `unexplained` would have been honest: "
        f"{sum(_is_wrong(outcome.full.code, outcome) for outcome in outcomes)} of {len(outcomes)}; from the data alone "
        f"{sum(_is_wrong(outcome.alone.code, outcome) for outcome in outcomes)}; without the FP32 pair as well "
        f"{sum(_is_wrong(outcome.sixteen_bit.code, outcome) for outcome in outcomes)}.",
        f"- Clean pairs accused: **{accused} of {len(clean)}**, each judged in its run and alone without an FP32 pair.",
        "",
        f"Made by `{_command(models)}`.",
    ]
    return "\n".join(lines)


def _held_out(usual: list[Outcome]) -> Iterator[str]:
    if held_out := [outcome for outcome in usual if outcome.model in HELD_OUT]:
        models = ", ".join(HELD_OUT)
        yield f"- The same on the architectures on which no threshold was chosen ({models}): **{_named(held_out)}**."


def _models(outcomes: list[Outcome], clean: list[CleanOutcome], judged: Mapping[str, str]) -> str:
    rows = []
    for model in sorted(judged, key=_place):
        ours = [outcome for outcome in outcomes if outcome.model == model]
        accused = [outcome.is_accused for outcome in clean if outcome.model == model]
        usual = [outcome for outcome in ours if outcome.usual]
        rows.append((model, judged[model], _named(usual), _named(ours), f"{sum(accused)} of {len(accused)}"))
    heads = ("model", "judged on", "named, usual strengths", "named, all strengths", "clean pairs accused")
    return _table("Models", heads, rows)


def _clean(clean: list[CleanOutcome]) -> str:
    by_variant: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for run in clean:
        by_variant[run.model, run.variant][run.pair] = run.in_run.code
    pairs = sorted({run.pair for run in clean})
    rows = [(*key, *(codes.get(pair, "not run") for pair in pairs)) for key, codes in by_variant.items()]
    return _table("Clean runs", ("model", "training path", *pairs), rows)


def _faults(outcomes: list[Outcome]) -> str:
    """One row a fault: on every model the share named, and the weakest strength from which on it is."""
    by_fault: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_fault[outcome.fault].append(outcome)
    rows = []
    for fault, held_out in by_fault.items():
        weakest: dict[str, list[str]] = defaultdict(list)
        for model in dict.fromkeys(item.model for item in held_out):
            weakest[_weakest([item for item in held_out if item.model == model])].append(model)
        rows.append(
            (
                fault,
                held_out[0].where,
                " or ".join(held_out[0].expected),
                _share(item.is_named for item in held_out),
                _share(_is_right(item.alone.code, item) for item in held_out),
                _share(_is_right(item.sixteen_bit.code, item) for item in held_out),
                "; ".join(f"{strength} ({len(models)})" for strength, models in weakest.items()),
            )
        )
    heads = ("fault", "in", "cause", "named", "data alone", "no FP32 pair", "weakest named (on models)")
    return _table("Faults", heads, rows)


def _matrix(outcomes: list[Outcome]) -> str:
    """Rows: the cause injected; columns: the cause named."""
    cells = Counter((outcome.expected[0], outcome.full.code) for outcome in outcomes)
    named = sorted({code for _, code in cells})
    rows = [
        (injected, *(str(cells[injected, code] or "") for code in named))
        for injected in sorted({outcome.expected[0] for outcome in outcomes})
    ]
    return _table("Confusion matrix (all strengths)", ("injected \\ named", *named), rows)


def _misses(outcomes: list[Outcome]) -> str:
    rows = [
        (
            outcome.model,
            outcome.fault,
            outcome.strength,
            "yes" if outcome.usual else "",
            outcome.full.code,
            outcome.full.sentence,
        )
        for outcome in outcomes
        if not outcome.is_named
    ]
    return _table("Not named", ("model", "fault", "strength", "usual", "verdict", "sentence"), rows)


def _named(outcomes: list[Outcome]) -> str:
    return _share(outcome.is_named for outcome in outcomes)


def _is_right(code: str, outcome: Outcome) -> bool:
    return code in outcome.expected


def _is_wrong(code: str, outcome: Outcome) -> bool:
    return code not in (*outcome.expected, *NOT_A_BUG, *NAMES_NO_CAUSE)


def _weakest(outcomes: Sequence[Outcome]) -> str:
    """The first strength, in the catalogue's order, that was named."""
    return next((outcome.strength for outcome in outcomes if outcome.is_named), "none")


def _share(hits: Iterable[bool]) -> str:
    flags = list(hits)
    return f"{sum(flags)} of {len(flags)}" + (f" ({sum(flags) / len(flags):.0%})" if len(flags) > 9 else "")


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
