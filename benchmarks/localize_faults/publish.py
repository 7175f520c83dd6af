"""The report: how often each fault was localised, by model and side, and who was accused without a fault."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.localize_faults.lab import NEW_TOKENS, NUM_PROMPTS, REAL_NEW_TOKENS, REAL_PROMPTS, Trial


def publish(trials: Sequence[Trial], folder: Path) -> None:
    """Write `localize-faults.md`."""
    planted = [trial for trial in trials if trial.fault is not None]
    clean = [trial for trial in trials if trial.fault is None]
    models = list(dict.fromkeys(trial.model for trial in trials))
    lines = [
        "# Planted faults, localised",
        "",
        "One fault at a time in one side of a BF16 pair, real vLLM against the training path:",
        f"{NUM_PROMPTS} responses of {NEW_TOKENS} tokens, of real checkpoints {REAL_PROMPTS} of {REAL_NEW_TOKENS} to",
        "shipped chats, a random place anew in each trial. Localised: there is a suspect, and every one is what was",
        "planted (module and layers, for a row of the head its token id).",
        "The other side, and all else on this one, rounds to BF16.",
        "",
        f"- Localised: **{_share(planted)}**.",
        f"- Models accused with nothing planted: **{sum(bool(trial.suspects) for trial in clean)} of {len(clean)}**.",
        "",
        "| fault | " + " | ".join(models) + " | all |",
        "|---|" + "---|" * (len(models) + 1),
    ]
    for label in dict.fromkeys(trial.fault.label for trial in planted if trial.fault is not None):
        same = [trial for trial in planted if trial.fault is not None and trial.fault.label == label]
        cells = [_share([trial for trial in same if trial.model == model]) for model in models]
        lines.append(f"| {label} | {' | '.join(cells)} | {_share(same)} |")
    lines += ["", "## Missed", ""]
    missed = [trial for trial in planted if not trial.is_localized]
    lines += [f"- {trial.model}, {trial.side}: {_sentence_of(trial)}" for trial in missed] or ["None."]
    seeds = sorted({trial.fault.seed for trial in planted if trial.fault is not None})
    lines += ["", f"Made by `python -m benchmarks.localize_faults SCRATCH`; seeds {', '.join(map(str, seeds))}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "localize-faults.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _share(trials: Sequence[Trial]) -> str:
    return f"{sum(trial.is_localized for trial in trials)} of {len(trials)}" if trials else ""


def _sentence_of(trial: Trial) -> str:
    assert trial.fault is not None
    where = trial.fault.place if trial.fault.layer is None else f"layer {trial.fault.layer} {trial.fault.place}"
    named = "; ".join(f"{suspect.place} in layers {suspect.layers}" for suspect in trial.suspects) or "nothing"
    return f"{trial.fault.label} at {where}: named {named}"
