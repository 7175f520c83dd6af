"""A comparison by its sizes, before anything of it is computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_probe.compare.cost.architecture import Architecture, Lengths
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.records.manifest import Manifest


@dataclass(frozen=True)
class ResponseLengths:
    """Tokens of a response on average, and of the longest. source: where that is known from."""

    mean_tokens: float
    longest_tokens: int
    source: str

    def limited_to(self, most: int) -> "ResponseLengths":
        return ResponseLengths(min(self.mean_tokens, most), min(self.longest_tokens, most), self.source)


@dataclass(frozen=True)
class Workload:
    """A comparison by its sizes: the tokens of each prompt, the architecture of each checkpoint by the path that sides
    name, and the dtype in which the run's own weights are stored. by_layer: the stages that hold one layer at a time.
    hidden_on_disk: whether hidden states between two layers are too many for memory there.
    ranks_share_cores: whether the ranks of a model share one processor, so that they take as long as one process would.
    """

    architectures: Mapping[str, Architecture]
    settings: CompareSettings
    prompt_tokens: Sequence[int]
    responses: ResponseLengths
    checkpoint_dtype: Dtype | None = None
    by_layer: frozenset[str] = frozenset()
    hidden_on_disk: bool = False
    ranks_share_cores: bool = True

    @property
    def pass_tokens(self) -> int:
        """Tokens of a forward pass over whole sequences."""
        return self.settings.training.batch_tokens

    @property
    def sequences(self) -> int:
        """Responses of one engine."""
        return len(self.prompt_tokens) * self.samples

    @property
    def samples(self) -> int:
        """Responses of an engine to each prompt."""
        return self.settings.sampling.samples_per_prompt

    @cached_property
    def prompts(self) -> Lengths:
        """Tokens of each prompt."""
        return np.asarray(self.prompt_tokens, dtype=np.float64)

    @property
    def lengths(self) -> Lengths:
        """Tokens of a sequence of each prompt, with its response."""
        return self.prompts + self.responses.mean_tokens

    def architecture_of(self, side: Side) -> Architecture:
        return self.architectures[side.model.path]


def workload_of(
    manifest: Manifest,
    architectures: Mapping[str, Architecture],
    prompt_tokens: Sequence[int],
    responses: ResponseLengths,
) -> Workload:
    """The sizes of a run; its responses are at most as long as its settings allow."""
    stored = manifest.model.checkpoint_dtype
    return Workload(
        architectures,
        manifest.settings,
        prompt_tokens,
        responses.limited_to(manifest.settings.sampling.max_new_tokens),
        next((dtype for dtype in Dtype if dtype == short_name(stored)), None),
        ranks_share_cores=not manifest.hardware.get("gpus") or manifest.settings.training.device == "cpu",
    )
