"""An engine that several ranks hold together, with vLLM's external launcher: all ranks run the same calls.

vLLM finds the ranks' process group and divides the model over it, on one machine or several.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Place
from mismatch_probe.compare.engine_job import run_engine
from mismatch_probe.compare.plan import PlannedJob
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.engines.base import CachedReplay, Engine, start_engine
from mismatch_probe.errors import RoutingUnseen, UsageError
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence
from mismatch_probe.training_path.ranks import group

if TYPE_CHECKING:
    import torch

_CLOSE: Final = "close"


def run_engine_over_ranks(run: RunDirectory, manifest: Manifest, job: PlannedJob, events: Send, place: Place) -> None:
    """`run_engine` on the first of several ranks that hold the engine together; the others run `follow`."""
    group.join(place)
    run_engine(run, manifest, job, events, RanksEngine)


@dataclass(frozen=True)
class _EngineOrder:
    """A call that every rank makes; the first one starts the engine with the arguments of `start_engine`."""

    what: str
    """The name of a method of the engine."""
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None


class RanksEngine(Engine):
    """The engine on the first rank, while the others run `follow`; all ranks must have joined the group."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Arguments and errors are those of `start_engine`."""
        group.from_first(_EngineOrder("start", arguments, named))
        self._engine = start_engine(*arguments, **named)

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
        return self._engine.vocab_size

    def require_same_policy(self, digests: Mapping[str, Any]) -> None:
        self._engine.require_same_policy(digests)

    def effective_settings(self) -> dict[str, Any]:
        return self._engine.effective_settings()

    def __exit__(self, *error: object) -> None:
        """Close after success only: after a failure the other ranks may be in a call, and end with this one."""
        if error[0] is None:
            self.close()

    def close(self) -> None:
        """Close the engine on every rank, which also destroys the process group."""
        group.from_first(_EngineOrder(_CLOSE))
        self._engine.close()

    def _on_every_rank(self, what: str, *arguments: Any) -> Any:
        self._engine.on_finished = self.on_finished
        group.from_first(_EngineOrder(what, arguments))
        with group.lost_ranks_named():
            return getattr(self._engine, what)(*arguments)


def follow(send: Send, place: dict[str, Any]) -> None:
    """Make the calls of the first rank on another rank, until the first rank closes its engine."""
    group.join(Place.from_json(place))
    start = _next_order()
    engine = start_engine(*start.arguments, **(start.keywords or {}))
    while (order := _next_order()).what != _CLOSE:
        with group.lost_ranks_named(), suppress(RoutingUnseen):  # the first one meets it too, and goes on
            getattr(engine, order.what)(*order.arguments)
    engine.close()


def _next_order() -> _EngineOrder:
    order: _EngineOrder | None = group.from_first(None)
    assert order is not None
    return order
