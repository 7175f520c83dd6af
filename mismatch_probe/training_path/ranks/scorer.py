"""A scorer whose model several ranks hold together: every rank makes the calls of the first rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mismatch_probe.children.start import RankPlace
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import FloatArray, ScoredSequence, TokenSequence
from mismatch_probe.training_path.ranks import group
from mismatch_probe.training_path.scorer import Scorer


class RanksScorer(group.HeldByRanks[Scorer]):
    """A `Scorer` on the first rank; the other ranks run `follow`. All ranks must have joined the group."""

    def __init__(
        self,
        checkpoint: str | Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        *,
        num_threads: int | None = None,
        **keywords: Any,
    ) -> None:
        """num_threads: of each rank; None for its share. The other arguments are those of `Scorer.load`."""
        super().__init__(_load_scorer, num_threads, checkpoint, dtype, settings, **keywords)

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
        return self._model.batches_at_once

    def effective_settings(self) -> dict[str, Any]:
        return self._model.effective_settings()


def follow(place: RankPlace) -> None:
    """What every rank but the first does, until that one says that it is done."""
    group.follow_first(place, _load_scorer, ends_with_close=False)


def _load_scorer(num_threads: int | None, *arguments: Any, **keywords: Any) -> Scorer:
    group.take_threads(num_threads)
    return Scorer.load(*arguments, **keywords)
