from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer

Score = Callable[..., list[ScoredSequence]]


@pytest.fixture(scope="session")
def sequences() -> list[TokenSequence]:
    """Responses of 1 to 60 tokens, one of them longer than the tiny models' sliding window, none sorted."""
    random = np.random.default_rng(0)
    return [
        TokenSequence(f"s{index}", random.integers(0, 256, prompt).tolist(), random.integers(0, 256, response).tolist())
        for index, (prompt, response) in enumerate([(7, 25), (1, 60), (12, 1), (5, 40), (3, 60)])
    ]


@pytest.fixture(scope="session")
def score(checkpoint: Callable[[str], Path], sequences: list[TokenSequence]) -> Score:
    """Scores of the sequences by the tiny model of `family`; further arguments are those of `Scorer.load`."""

    def scores(
        family: str, dtype: Dtype, settings: TrainingPathSettings | None = None, **arguments: object
    ) -> list[ScoredSequence]:
        with Scorer.load(checkpoint(family), dtype, settings or TrainingPathSettings(), **arguments) as scorer:
            return scorer.score_batch(sequences)

    return scores
