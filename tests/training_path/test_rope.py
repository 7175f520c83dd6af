"""Log-probs under frequencies that follow the length depend on their own sequence: not on a past, nor on neighbours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer
from mismatch_probe.training_path.by_layer_scorer import LayerByLayerScorer
from mismatch_probe.training_path.loading import follows_length_beyond, forget_lengths
from tests.tiny_models import make_checkpoint

TRAINED = 32
_HALF_A_HEAD = 16
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0] * _HALF_A_HEAD, "long_factor": [4.0] * _HALF_A_HEAD,
    },
}  # fmt: skip


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, rope_parameters=KINDS[request.param], max_position_embeddings=TRAINED)


def sequence(num_tokens: int) -> TokenSequence:
    ids = [(7 * place + place * place) % 250 for place in range(num_tokens)]
    return TokenSequence(f"of {num_tokens}", ids[:4], ids[4:])


LENGTHS = (TRAINED - 2, TRAINED + 1, TRAINED + 2, TRAINED + 8, 3 * TRAINED)
"""One token less is computed: the second is the longest that keeps the frequencies it was trained with."""


def alone(folder: Path, num_tokens: int) -> ScoredSequence:
    """Scores of a sequence by a model that has computed nothing else."""
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings()) as scorer:
        return scorer.score_batch([sequence(num_tokens)])[0]


@pytest.mark.slow
def test_a_sequence_has_the_same_bits_whatever_is_scored_before_and_beside_it(folder: Path) -> None:
    expected = [alone(folder, num_tokens).logprobs for num_tokens in LENGTHS]
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings()) as scorer:
        assert scorer.effective_settings()["rope_follows_length_beyond"] == TRAINED
        scorer.score_batch([sequence(4 * TRAINED)])
        one_by_one = [scorer.score_batch([sequence(num_tokens)])[0].logprobs for num_tokens in reversed(LENGTHS)]
        together = [scored.logprobs for scored in scorer.score_batch(list(map(sequence, LENGTHS)))]
    for mine, in_turn, beside in zip(expected, reversed(one_by_one), together, strict=True):
        np.testing.assert_array_equal(in_turn, mine)
        np.testing.assert_allclose(beside, mine, atol=1e-5)


@pytest.mark.slow
def test_layer_by_layer_gives_the_bits_of_the_whole(folder: Path) -> None:
    rows = [sequence(num_tokens) for num_tokens in LENGTHS]
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings(), reference=True) as scorer:
        logprobs_alone = [scorer.score_batch([row])[0].logprobs for row in rows]
    with LayerByLayerScorer.load_layered(folder, Dtype.FP32, TrainingPathSettings(), why="the test") as layered:
        for row, expected in zip(rows, logprobs_alone, strict=True):
            np.testing.assert_array_equal(layered.score_batch([row])[0].logprobs, expected)


def test_without_it_the_past_shows(tmp_path: Path) -> None:
    """The inverse: transformers' own dynamic frequencies are those of the longest sequence before."""
    folder = make_checkpoint(tmp_path, rope_parameters=KINDS["dynamic"], max_position_embeddings=TRAINED)
    ids, longer = (sequence(num_tokens).token_ids for num_tokens in (TRAINED + 8, 4 * TRAINED))

    def logits(model: PreTrainedModel, token_ids: list[int]) -> Any:
        return model(input_ids=model.dummy_inputs["input_ids"].new_tensor([token_ids])).logits.detach().numpy()

    for forgets in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        if forgets:
            forget_lengths(model)
        first = logits(model, ids)
        logits(model, longer)
        assert np.array_equal(logits(model, ids), first) is forgets


def test_frequencies_that_stay_follow_nothing(tmp_path: Path) -> None:
    assert follows_length_beyond(AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path))) is None
