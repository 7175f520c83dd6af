"""Whether the mismatch of one training run can be so many times that of another: only where both learn the same."""

from typing import Any, Final

from mismatch_probe.config.nested import differences
from mismatch_probe.records.training_run import TrainingManifest

_DECISIVE: Final = ("task", "rollout", "objective", "optimizer", "critic")
"""Tables of settings that decide what is sampled and learnt. Others say in which arithmetic, how far, what is kept."""


def what_differs(manifest: TrainingManifest, other: TrainingManifest) -> list[str]:
    """What is not the same of model, problems and decisive settings, by name; dtypes may differ.

    Runs of another seed draw other problems of the same task.
    """
    differing = ["model"] if _model(manifest) != _model(other) else []
    differing += [name for name, _, _ in differences(_decisive(manifest), _decisive(other))]
    if not differing and manifest.settings.seed == other.settings.seed and _problems(manifest) != _problems(other):
        differing.append("the problems themselves")
    return differing


def _decisive(manifest: TrainingManifest) -> dict[str, Any]:
    settings = manifest.settings.model_dump(mode="json")
    return {name: settings[name] for name in _DECISIVE} | {"policy.lora": settings["policy"]["lora"]}


def _model(manifest: TrainingManifest) -> str:
    return manifest.model.fingerprint


def _problems(manifest: TrainingManifest) -> str | None:
    return manifest.content_keys.get("problems")
