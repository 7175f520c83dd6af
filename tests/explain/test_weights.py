"""Other weights, other rotary frequencies, another format: and what none of them is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fault_lab.in_training import other_weights, with_dropout, with_other_config
from benchmarks.fault_lab.models import with_weights
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain import explain, predictions
from mismatch_probe.records.sequences import FloatArray, TokenSequence
from tests.explain.conftest import Explained
from tests.explain.logs import logged, sampled, scored, settings
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stale(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(llama, tmp_path_factory.mktemp("stale") / "weights", 0.01)


def test_a_given_older_checkpoint_is_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, stale: Path
) -> None:
    side = explained(scored(stale, responses), weights=({"version": "step 7", "checkpoint": str(stale)},))
    assert side.verdict.code == "stale_weights"
    assert "the weights of step 7" in side.verdict.sentence


def test_given_weights_that_move_far_less_than_rounding_are_named_and_accuse_no_clean_log(
    llama: Path, responses: list[TokenSequence], explained: Explained, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)

    def head_changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 0.003 * torch.randn(tensor.shape, generator=generator)) if "head" in name else tensor

    near = with_weights(llama, tmp_path / "near", head_changed)
    given = ({"version": "step 7", "checkpoint": str(near)},)
    side = explained(scored(near, responses), weights=given)
    assert side.verdict.code == "stale_weights"
    assert side.explained_by is not None
    assert side.explained_by.explained < 0.1
    assert "the residuals point to it" in side.verdict.evidence[-1]
    assert explained(scored(llama, responses), weights=given).verdict.code == "as_declared"


def test_a_version_that_the_log_names_is_a_declared_one(
    responses: list[TokenSequence], explained: Explained, stale: Path
) -> None:
    given = ({"version": "7", "checkpoint": str(stale)},)
    side = explained(scored(stale, responses), line={"weight_version": "7"}, weights=given)
    assert side.verdict.code == "as_declared"


def test_weights_older_than_the_named_version_are_told_by_how_many(
    llama: Path, responses: list[TokenSequence], explained: Explained, stale: Path
) -> None:
    given = ({"version": "7", "checkpoint": str(stale)}, {"version": "8", "checkpoint": str(llama)})
    side = explained(scored(stale, responses), line={"weight_version": "8"}, weights=given)
    assert side.verdict.code == "stale_weights"
    assert side.explained_by is not None


def test_weights_that_nobody_gives_are_unexplained_and_repeatable(
    responses: list[TokenSequence], explained: Explained, stale: Path
) -> None:
    side = explained(scored(stale, responses))
    assert (side.verdict.kind, side.verdict.code) == ("undecided", "unexplained")
    assert side.explained_by is None
    assert "agrees with itself" in side.verdict.evidence[-1]


def test_dropout_is_told_by_the_same_context_scored_twice(tmp_path: Path) -> None:
    """A model less uncertain than the others, so that responses to one prompt begin alike now and then."""
    model = make_checkpoint(tmp_path, init_std=0.3)
    responses = sampled(model)
    with torch.random.fork_rng(), with_dropout(model, 0.01)(Dtype.BF16, False) as dropped:
        torch.manual_seed(0)
        columns = [one.logprobs for one in dropped.score(list(responses))]
    (side,) = explain(settings(model), logged(responses, mu=columns)).sides
    assert side.verdict.code == "not_repeatable"


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        ({"rope_type": "default", "rope_theta": 4e4}, "a RoPE base of 4 times the checkpoint's"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "RoPE positions divided by 2"),
    ],
)
def test_other_rotary_frequencies_are_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, tmp_path: Path, rope: dict[str, Any], what: str
) -> None:
    with with_other_config(llama, tmp_path / "other", rope_parameters=rope)(Dtype.BF16, False) as opened:
        columns: list[FloatArray] = [one.logprobs for one in opened.score(list(responses))]
    side = explained(columns)
    assert side.verdict.code == "positions"
    assert what in side.verdict.sentence


@pytest.mark.parametrize(
    ("declared", "really"), [("bf16", "fp16"), ("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16")]
)
def test_another_format_is_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, declared: str, really: str
) -> None:
    side = explained(scored(llama, responses, Dtype(really)), mu={"dtype": declared})
    assert side.verdict.code == "one_sided_dtype"
    assert f"{really.upper()} arithmetic instead of {declared.upper()}" in side.verdict.sentence


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_log_probs_rounded_to_16_bits_are_named(
    llama: Path, responses: list[TokenSequence], explained: Explained, dtype: str
) -> None:
    side = explained(scored(llama, responses, log_softmax_dtype=dtype))
    assert side.verdict.code == "one_sided_dtype"
    assert f"rounded to {dtype}" in side.verdict.sentence


def test_other_weights_do_not_pass_for_a_coarser_format(
    llama: Path, responses: list[TokenSequence], explained: Explained, tmp_path: Path
) -> None:
    """Changes of the size of BF16's rounding, where FP16 is declared."""
    near = other_weights(llama, tmp_path / "near", 2e-3)
    side = explained(scored(near, responses, Dtype.FP16), mu={"dtype": "fp16"})
    assert side.verdict.code == "unexplained"


def test_two_departures_are_named_together_and_their_weights_are_not_loaded_for_each_that_is_tried(
    responses: list[TokenSequence], explained: Explained, stale: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str | None] = []
    load = predictions.reference_weights

    def counted(*words: Any, checkpoint: str | None = None, **others: Any) -> Any:
        loaded.append(checkpoint)
        return load(*words, checkpoint=checkpoint, **others)

    monkeypatch.setattr(predictions, "reference_weights", counted)
    given = ({"version": "step 7", "checkpoint": str(stale)},)
    side = explained(scored(stale, responses, temperature=0.8), weights=given)
    assert {side.verdict.code, *(cause.code for cause in side.verdict.also)} == {"temperature", "stale_weights"}
    assert 0 < len(loaded) <= 2
