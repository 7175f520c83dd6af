"""The effective settings of both sides, as they were read back from what ran."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.manifest import CheckpointDifference, ModelIdentity


@dataclass(frozen=True)
class Sides:
    """One pair: what was asked of it, and what the loaded model (`train`) and the running engine (`infer`) say.

    checkpoints: those that the training path and the engine loaded, None where it is the same without saying.
    difference: what these two were found to differ in; None where they are one, or in a run made before they were
    compared. doubled_first_token: the token that every prompt begins with twice, None where there is none.
    lacking_start: the token that texts of this family begin with, how many prompts do not, and how many there are.
    """

    train_dtype: Dtype
    infer_dtype: Dtype
    train: Mapping[str, Any]
    infer: Mapping[str, Any]
    checkpoints: tuple[ModelIdentity, ModelIdentity] | None = None
    difference: CheckpointDifference | None = None
    doubled_first_token: int | None = None
    lacking_start: tuple[str, int, int] | None = None

    @property
    def load_the_same(self) -> bool:
        """Whether both loaded the same weights."""
        if self.difference is not None:
            return not self.difference.weights.are_other
        return self.checkpoints is None or self.checkpoints[0].fingerprint == self.checkpoints[1].fingerprint

    @property
    def facts(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """What reaches the forward pass of the training path and of the engine; None where a side does not say."""
        train, infer = self.train.get("config"), self.infer.get("config")
        return None if train is None or infer is None else (train, infer)

    def stated(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Those of the engine's settings that it states."""
        return ((name, self.infer[name]) for name in names if self.infer.get(name) is not None)
