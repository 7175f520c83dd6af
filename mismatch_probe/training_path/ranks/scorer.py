"""A scorer whose model several ranks hold together: every rank makes the calls of the first rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Place
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.host import Closing
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import FloatArray, ScoredSequence, TokenSequence
from mismatch_probe.training_path.ranks import group
from mismatch_probe.training_path.scorer import Scorer

_LOAD: Final = "load"
_CLOSE: Final = "close"
_END: Final = "end"


@dataclass(frozen=True)
class _ScorerOrder:
    what: str
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None


class RanksScorer(Closing):
    """`Scorer` on the first rank, while the others run `follow`; all ranks must have joined the group."""

    def __init__(
        self,
        checkpoint: str | Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        *,
        num_threads: int | None = None,
        **named: Any,
    ) -> None:
        """Load the model on every rank; `num_threads` of each rank, or its share for None. See `Scorer.load`."""
        load = _ScorerOrder(_LOAD, (num_threads, checkpoint, dtype, settings), named)
        group.from_first(load)
        self._scorer = _load_scorer(*load.arguments, **named)

    def score_batch(self, batch: list[TokenSequence]) -> list[ScoredSequence]:
        (scores,) = self.score_together([batch])
        return scores

    def score_together(self, batches: list[list[TokenSequence]]) -> list[list[ScoredSequence]]:
        scores: list[list[ScoredSequence]] = self._on_every_rank("score_together", batches)
        return scores

    def distributions(self, sequence: TokenSequence, positions: Sequence[int]) -> FloatArray:
        log_probs: FloatArray = self._on_every_rank("distributions", sequence, positions)
        return log_probs

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        routing: list[SequenceRouting] = self._on_every_rank("routing", sequences)
        return routing

    @property
    def batches_at_once(self) -> int:
        return self._scorer.batches_at_once

    def effective_settings(self) -> dict[str, Any]:
        return self._scorer.effective_settings()

    def __exit__(self, *error: object) -> None:
        """Close after success only: after a failure the other ranks may be in a call, and end with this one."""
        if error[0] is None:
            self.close()

    def close(self) -> None:
        group.from_first(_ScorerOrder(_CLOSE))
        self._scorer.close()

    def _on_every_rank(self, what: str, *arguments: Any) -> Any:
        group.from_first(_ScorerOrder(what, arguments))
        with group.lost_ranks_named():
            return getattr(self._scorer, what)(*arguments)


def follow(send: Send, place: dict[str, Any]) -> None:
    """Make the calls of the first rank on another rank, until the first rank is done."""
    group.join(Place.from_json(place))
    scorer: Scorer | None = None
    while True:
        order: _ScorerOrder | None = group.from_first(None)
        assert order is not None
        if order.what == _END:
            group.leave()
            return
        if order.what == _LOAD:
            scorer = _load_scorer(*order.arguments, **(order.keywords or {}))
        elif order.what == _CLOSE:
            assert scorer is not None
            scorer.close()
            scorer = None
        else:
            with group.lost_ranks_named():
                getattr(scorer, order.what)(*order.arguments)


def _load_scorer(num_threads: int | None, *arguments: Any, **keywords: Any) -> Scorer:
    group.take_threads(num_threads)
    return Scorer.load(*arguments, **keywords)


def dismiss() -> None:
    """End `follow` on the other ranks; the first rank calls it when it is done."""
    group.from_first(_ScorerOrder(_END))
    group.leave()
