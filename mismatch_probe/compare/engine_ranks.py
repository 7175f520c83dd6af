"""An engine that several ranks hold together, with vLLM's external launcher: all ranks run the same calls.

vLLM finds the ranks' process group and divides the model over it, on one machine or several.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import RankPlace
from mismatch_probe.compare.engine_job import run_engine
from mismatch_probe.compare.plan import PlannedJob
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import CachedReplay, Engine
from mismatch_probe.engines.start import start_engine
from mismatch_probe.errors import UsageError
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence
from mismatch_probe.training_path import rank_group

if TYPE_CHECKING:
    import torch


def run_engine_over_ranks(
    run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send, place: RankPlace
) -> None:
    """`run_engine` on the first of several ranks that hold the engine together; the others follow it."""
    rank_group.join(place)
    run_engine(run, manifest, job, events, RanksEngine)


class RanksEngine(rank_group.HeldByRanks[Engine], Engine):
    """The engine on the first rank; the others are in `rank_group.follow_first`. All must have joined the group."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Arguments and errors are those of `start_engine`."""
        super().__init__(start_engine, *arguments, **keywords)

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        responses: list[SampledSequence] = self._on_every_rank("sample", requests, sampling)
        return responses

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        scores: list[ScoredSequence] = self._on_every_rank("replay", sequences)
        return scores

    def replay_cached(self, sequences: Sequence[TokenSequence]) -> list[CachedReplay]:
        replays: list[CachedReplay] = self._on_every_rank("replay_cached", sequences)
        return replays

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        routing: list[SequenceRouting] = self._on_every_rank("routing", sequences)
        return routing

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        log_probs: FloatArray = self._on_every_rank("distributions", contexts)
        return log_probs

    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        raise UsageError("a comparison's engine over ranks keeps the weights it was started with")

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def require_same_policy(self, digests: Mapping[str, Any]) -> None:
        self._model.require_same_policy(digests)

    def effective_settings(self) -> dict[str, Any]:
        return self._model.effective_settings()

    def _on_every_rank(self, method: str, *arguments: Any) -> Any:
        self._model.on_finished = self.on_finished
        return super()._on_every_rank(method, *arguments)
