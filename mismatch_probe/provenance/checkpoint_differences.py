"""Two checkpoints set against each other: weights, configuration, tokenizer and chat template, each for itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_probe.config.nested import differences
from mismatch_probe.provenance.checkpoint import read_config, read_description, text_config
from mismatch_probe.provenance.tokenizer_differences import template_difference, tokenizer_differences
from mismatch_probe.provenance.weight_differences import weights_difference
from mismatch_probe.records.checkpoint_difference import CheckpointDifference


def checkpoint_difference(train: tuple[str, Path], infer: tuple[str, Path]) -> CheckpointDifference:
    """Of two checkpoints, each by the name that a side gives it and its folder.

    Raises:
        UsageError: a file of one cannot be read.
    """
    ours, theirs = train[1], infer[1]
    generation = (read_description(folder / "generation_config.json") or {} for folder in (ours, theirs))
    return CheckpointDifference(
        train=train[0],
        infer=infer[0],
        weights=weights_difference(ours, theirs),
        config=_differing(*(text_config(read_config(folder)) for folder in (ours, theirs))),
        generation=_differing(*generation),
        tokenizer=tokenizer_differences(ours, theirs),
        chat_template=template_difference(ours, theirs),
    )


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (mine, its) for name, mine, its in differences(ours, theirs)}
