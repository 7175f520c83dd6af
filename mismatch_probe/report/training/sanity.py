"""What came of a sanity test, for the page and the terminal.

What runs on one page are called: by what differs between them, or by their folders.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Final

from markupsafe import Markup

from mismatch_probe.config.nested import flat
from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import write_many, write_percent
from mismatch_probe.records.training_run import (
    PASS_ACCURACY,
    TOO_FEW_STEPS,
    SanityRecord,
    TrainingDirectory,
    TrainingManifest,
)
from mismatch_probe.report.view import Badge, Tile

_UNFINISHED = "unfinished"
_NOT_PASSED = "not passed: "


def sanity_answer(record: SanityRecord) -> dict[str, Any]:
    """Fields of the overview that say whether the test is passed, and why not."""
    return {
        "subject": "sanity test",
        "badge": sanity_badge(record),
        "headline": sanity_headline(record),
        "tiles": _tiles(record),
    }


def sanity_headline(record: SanityRecord) -> str:
    """What came of the test, and how many of the latest responses were right."""
    return f"Sanity test {_verdict(record)}. {_sentence(_solved_words(record))}"


def _solved_words(record: SanityRecord) -> str:
    solved = record.accuracy
    if solved is None:
        return "not every problem was seen"
    bounds = "" if solved.low is None or solved.high is None else f" [{_share(solved.low)}, {_share(solved.high)}]"
    return (
        f"{_share(solved.value)}{bounds} of the latest responses to {write_many(len(record.latest), 'problem')} solved"
    )


def _verdict(record: SanityRecord) -> str:
    if record.passed is None:
        return _UNFINISHED
    return record.verdict if record.passed else f"failed: {record.verdict.removeprefix(_NOT_PASSED)}"


def sanity_badge(record: SanityRecord) -> Badge:
    """In place of how the training ended, which says nothing of the test."""
    if record.passed is None:
        return Badge("undecided", _UNFINISHED)
    return Badge("clean", "passed") if record.passed else Badge("bug", "failed")


def _tiles(record: SanityRecord) -> list[Tile]:
    solved, needed = record.accuracy, f"more than {write_percent(PASS_ACCURACY)} passes"
    if solved is None:
        share = Tile("Solved", "not known", f"{write_many(len(record.latest), 'problem')} seen; {needed}")
    else:
        interval = "" if solved.low is None or solved.high is None else f"{_share(solved.low)} to {_share(solved.high)}"
        share = Tile("Solved", _share(solved.value), "; ".join(part for part in (interval, needed) if part))
    kept = Tile(
        "Problems kept",
        "none yet" if record.kept is None else f"{len(record.kept):,}",
        f"of {len(record.rates):,} tried, those solved {write_percent(record.settings.keep_low)} to "
        f"{write_percent(record.settings.keep_high)} of the time",
    )
    return [share, kept, _next(record)]


def _next(record: SanityRecord) -> Tile:
    done = f"after step {record.step:,}"
    if record.passed:
        return Tile("Next step", "Train on", f"{done} what is known to be learnable was learnt")
    if record.passed is None:
        again = Markup('{}: the same command with <span class="whole">--resume</span>').format(done)
        return Tile("Next step", "Go on", again)
    if record.verdict.endswith(TOO_FEW_STEPS):
        flags = '<span class="whole">--resume</span> and a larger <span class="whole">--steps</span>'
        return Tile("Next step", "More steps", Markup(f"{{}}: the same command with {flags}").format(done))
    return Tile("Next step", "Mend and repeat", f"{done}: why it ended stands above")


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _share(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


DTYPES: Final = "dtypes"
_LORA: Final = "policy.lora"
_CALLED: Final = {"objective.name": "objective", "task.source": "task", _LORA: "LoRA"}
_MOST_DIFFERENCES: Final = 2
_OF_NO_EFFECT: Final = (
    *("model", "steps", "report_to", "guards", "checkpoint.every", "checkpoint.keep"),
    *("policy.device", "policy.micro_batch_tokens", "policy.gradient_checkpointing"),
)


def run_labels(directories: Sequence[TrainingDirectory], manifests: Sequence[TrainingManifest]) -> list[str]:
    """`BF16`, `PPO, seed 1`: a name for each run, no two alike."""
    differing = what_varies(manifests)
    if 0 < len(differing) <= _MOST_DIFFERENCES:
        labels = [", ".join(_words(name, manifest) for name in differing) for manifest in manifests]
        if len(set(labels)) == len(labels):
            return labels
    if len(manifests) == 1:
        return [sides_label(manifests[0].settings.train_dtype, manifests[0].settings.infer_dtype)]
    return _folders(directories)


def what_varies(manifests: Sequence[TrainingManifest]) -> list[str]:
    """Settings that are not the same in all runs and may change what is learnt; both dtypes are one of them."""
    sides = [dict(_named(manifest)) for manifest in manifests]
    names = dict.fromkeys(name for side in sides for name in side)
    return [name for name in names if any(side.get(name) != sides[0].get(name) for side in sides)]


def _named(manifest: TrainingManifest) -> Iterator[tuple[str, Any]]:
    settings = manifest.settings.model_dump(mode="json")
    yield "model", manifest.model.fingerprint
    yield DTYPES, (settings.pop("train_dtype"), settings.pop("infer_dtype"))
    yield _LORA, settings["policy"].pop("lora")
    for name, value in flat(settings):
        if not name.startswith(_OF_NO_EFFECT):
            yield name, value


def _words(name: str, manifest: TrainingManifest) -> str:
    settings = manifest.settings
    match name:
        case "model":
            return PurePath(manifest.model.name).name
        case "dtypes":
            return sides_label(settings.train_dtype, settings.infer_dtype)
        case "objective.name":
            return settings.objective.name
        case "task.source":
            return settings.task.source
        case "policy.lora":
            return "no LoRA" if settings.policy.lora is None else f"LoRA of rank {settings.policy.lora.rank}"
    value = dict(_named(manifest)).get(name)
    written = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{setting_words(name)} {written}"


def setting_words(name: str) -> str:
    """`learning rate` for `optimizer.learning_rate`."""
    return _CALLED.get(name, name.rpartition(".")[2].replace("_", " "))


def _folders(directories: Sequence[TrainingDirectory]) -> list[str]:
    """Their names, or their whole paths where two share a name."""
    names = [directory.path.absolute().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory.path) for directory in directories]
