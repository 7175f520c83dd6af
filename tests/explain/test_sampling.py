"""The engine's settings: each fault is injected into real log-probs, and found with its value."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import FloatArray, TokenSequence
from mismatch_probe.training_path import Scorer
from tests.explain.conftest import Explained
from tests.explain.logs import scored


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 0.97, 1.3])
def test_a_hidden_temperature_is_named_with_its_value(
    llama: Path, responses: list[TokenSequence], explained: Explained, temperature: float
) -> None:
    side = explained(scored(llama, responses, temperature=temperature))
    assert side.verdict.code == "temperature"
    assert side.explained_by is not None
    assert side.explained_by.departures[0].value == pytest.approx(temperature, rel=0.01)


@pytest.mark.slow
def test_raw_log_probs_are_not_called_a_fitted_temperature(
    llama: Path, responses: list[TokenSequence], explained: Explained
) -> None:
    side = explained(scored(llama, responses), mu={"temperature": 0.6})
    assert side.verdict.code == "raw_logprobs"


@pytest.mark.slow
def test_the_logs_own_temperature_is_a_declared_one(
    llama: Path, responses: list[TokenSequence], explained: Explained
) -> None:
    side = explained(scored(llama, responses, temperature=0.6), line={"temperature": 0.6})
    assert side.verdict.code == "as_declared"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "what"), [({"top_p": 0.9}, "top-p 0.9"), ({"top_k": 20}, "top-k 20"), ({"min_p": 0.05}, "min-p 0.05")]
)
def test_probabilities_of_a_part_of_the_vocabulary_are_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, cut: dict[str, float], what: str
) -> None:
    side = explained(renormalised(llama, responses, **cut))
    assert side.verdict.code == "truncated_support"
    assert side.explained_by is not None
    assert [departure.what for departure in side.explained_by.departures] == [what]


@pytest.mark.slow
def test_a_cut_that_is_declared_and_not_applied_is_named(
    llama: Path, responses: list[TokenSequence], explained: Explained
) -> None:
    side = explained(scored(llama, responses), mu={"top_p": 0.8})
    assert side.verdict.code == "raw_logprobs"


def renormalised(
    checkpoint: Path, responses: list[TokenSequence], top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> list[FloatArray]:
    """Log-probs in BF16 over what is kept; a sampled token that is not kept would not have been sampled, so it is."""
    found = []
    with Scorer.load(checkpoint, Dtype.BF16, TrainingPathSettings()) as scorer:
        for response in responses:
            distributions = scorer.distributions(response, range(len(response.token_ids))).astype(np.float64)
            own = distributions[np.arange(len(distributions)), response.token_ids]
            kept = np.empty(len(distributions))
            for place, row in enumerate(distributions):
                ordered = np.sort(np.exp(row))[::-1]
                count = len(ordered)
                if min_p:
                    count = int((ordered >= min_p * ordered[0]).sum())
                if top_k:
                    count = min(count, top_k)
                if top_p < 1:
                    count = int(np.searchsorted(np.cumsum(ordered), top_p)) + 1
                kept[place] = ordered[: max(count, int((ordered >= np.exp(own[place])).sum()))].sum()
            found.append(own - np.log(kept))
    return found
