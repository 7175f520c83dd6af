"""What runs on one page are called: by what differs between them, or by their folders."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Final

from mismatch_probe.config.nested import flat
from mismatch_probe.dtypes import sides_label
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest

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
