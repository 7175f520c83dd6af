"""Rounding accuses nobody; one wrong row, one wrong constant, one better side are named. On simulated sums."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.names import Names
from mismatch_probe.localize.summarise import place_errors
from mismatch_probe.localize.suspects import find_suspects, rounding_unit
from mismatch_probe.records.localize import Suspect
from mismatch_probe.records.place_errors import ErrorSums, PlaceSums, SideSums
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Sequences

NUM_SEQUENCES, TOKENS_EACH, CHANNELS = 12, 40, 64
NAMES = Names([f"model.layers.{i}" for i in range(4)], [f"model.layers.{i}" for i in range(4)], {})


def side(
    seed: int, *, size: float = 1.0, dtype: Dtype = Dtype.BF16, scale: float = 0.0, row: int | None = None
) -> SideSums:
    """Own errors of `size` roundings, an output `scale` too long, and one channel with ten times the error."""
    random = np.random.default_rng(seed)
    target = random.standard_normal((NUM_SEQUENCES * TOKENS_EACH, CHANNELS))
    error = random.standard_normal(target.shape) * size * rounding_unit(dtype) * np.abs(target) / 2 + scale * target
    if row is not None:
        error[:, row] *= 10
    sums = _sums(error, target)
    tokens = np.array([float(len(target))])
    return SideSums(sums, sums, (error**2).sum(0), (target**2).sum(0), (target**4).sum(0), tokens)


def _sums(error: np.ndarray, target: np.ndarray) -> ErrorSums:
    def by_sequence(terms: np.ndarray) -> np.ndarray:
        return np.asarray(terms.sum(1).reshape(NUM_SEQUENCES, TOKENS_EACH).sum(1))

    tokens = np.full(NUM_SEQUENCES, float(TOKENS_EACH))
    sums = (by_sequence(products) for products in (target**2, (target + error) ** 2, error**2, error * target))
    return ErrorSums(tokens, *sums, np.array([np.abs(error).max()]))


def place(name: str, layer: int | None, infer: SideSums, train: SideSums) -> PlaceSums:
    return PlaceSums(layer, name, infer, train, infer.total)


def suspects(*places: PlaceSums, infer: Dtype = Dtype.BF16, train: Dtype = Dtype.BF16) -> list[Suspect]:
    estimator = Estimator(Sequences.of_lengths([TOKENS_EACH] * NUM_SEQUENCES))
    settings = LocalizeSettings(model=ModelSettings(path=""), infer_dtype=infer, train_dtype=train)
    return find_suspects(places, place_errors(places, estimator, NAMES, settings), infer, train)


def test_rounding_on_both_sides_accuses_nobody() -> None:
    clean = [place(name, layer, side(7 * layer), side(7 * layer + 1)) for layer in range(4) for name in ("norm", "mlp")]
    assert suspects(*clean) == []


def test_a_side_that_rounds_half_again_as_much_is_not_accused() -> None:
    assert suspects(place("self_attn.rotary_emb[q]", 0, side(0), side(1, size=1.5))) == []


@pytest.mark.parametrize(
    ("infer", "train"), [(Dtype.BF16, Dtype.FP32), (Dtype.FP16, Dtype.BF16), (Dtype.FP32, Dtype.FP16)]
)
def test_another_dtype_on_each_side_is_no_fault(infer: Dtype, train: Dtype) -> None:
    two = place("mlp.up_proj", 0, side(0, dtype=infer), side(1, dtype=train))
    assert suspects(two, infer=infer, train=train) == []


@pytest.mark.parametrize("row", [None, 17])
def test_the_rounding_of_16_bits_is_no_fault_beside_fp32_which_has_none(row: int | None) -> None:
    exact, rounded = side(0, size=0.0), side(1, size=1.5)
    if row is not None:
        rounded.own_channels[row] *= 100
        rounded.target_channels[row] *= 100
        rounded.target_fourths[row] *= 100**2
    assert suspects(place("mlp.up_proj", 0, exact, rounded), infer=Dtype.FP32) == []
    assert suspects(place("mlp.up_proj", 0, rounded, exact), train=Dtype.FP32) == []


def test_luck_of_one_of_two_formats_in_a_channel_is_no_fault() -> None:
    lucky = side(0, dtype=Dtype.FP16)
    lucky.own_channels[22] /= 25
    assert suspects(place("input_layernorm", 0, lucky, side(1, size=1.5)), infer=Dtype.FP16) == []
    (suspect,) = suspects(place("mlp.up_proj", 0, side(0, dtype=Dtype.FP16), side(1, size=15)), infer=Dtype.FP16)
    assert suspect.side == "train"


@pytest.mark.parametrize("wrong", ["infer", "train"])
def test_a_wrong_side_is_named_in_fp32_and_beside_it(wrong: str) -> None:
    exact = side(0, dtype=Dtype.FP32, size=100.0 if wrong == "infer" else 0.0)
    (suspect,) = suspects(place("mlp.up_proj", 0, exact, side(1, size=60 if wrong == "train" else 1)), infer=Dtype.FP32)
    assert suspect.side == wrong
    assert "something else" in suspect.sentence


def test_a_length_that_weights_rounded_in_another_format_explain_accuses_no_norm() -> None:
    two = place("input_layernorm", 0, side(0, scale=4e-4), side(1, dtype=Dtype.FP16))
    assert suspects(two, train=Dtype.FP16) == []


def test_a_side_whose_error_is_far_beyond_rounding_is_named() -> None:
    (suspect,) = suspects(place("mlp.up_proj", 2, side(0, size=30), side(1)))
    assert (suspect.place, suspect.layers, suspect.side, suspect.channel) == ("mlp.up_proj", [2], "infer", None)
    assert suspect.times > 10
    assert "something else" in suspect.sentence


def test_one_wrong_row_is_named_with_its_number() -> None:
    (suspect,) = suspects(place("lm_head", None, side(0), side(1, row=17)))
    assert (suspect.place, suspect.side, suspect.channel) == ("lm_head", "train", 17)


def test_a_side_in_higher_precision_is_told_from_a_wrong_one() -> None:
    (suspect,) = suspects(place("mlp.gate", 1, side(0, size=1e-3), side(1)))
    assert suspect.side == "train"
    assert "higher precision" in suspect.sentence


def test_a_norm_that_is_a_little_too_long_is_seen_below_the_noise_of_rounding() -> None:
    (suspect,) = suspects(place("input_layernorm", 3, side(0), side(1, scale=4e-4)))
    assert (suspect.place, suspect.layers, suspect.side) == ("input_layernorm", [3], "train")
    assert "epsilon" in suspect.sentence


def test_only_the_innermost_of_nested_places_is_named() -> None:
    wrong = [place(name, 1, side(0, size=30), side(1)) for name in ("mlp.up_proj", "mlp", "block")]
    assert [suspect.place for suspect in suspects(*wrong)] == ["mlp.up_proj"]


def test_the_same_place_in_several_layers_is_one_suspect() -> None:
    (suspect,) = suspects(*(place("self_attn.rotary_emb[q]", layer, side(0, size=30), side(1)) for layer in range(3)))
    assert suspect.layers == [0, 1, 2]
    assert suspect.train_names == [f"model.layers.{layer}.self_attn.rotary_emb[q]" for layer in range(3)]


def test_a_place_that_is_exact_on_both_sides_is_not_suspect() -> None:
    exact = side(0, size=0.0)
    assert suspects(place("embed_tokens", None, exact, exact)) == []


def test_a_channel_that_one_huge_token_decides_needs_more_to_accuse() -> None:
    lucky, unlucky = side(0), side(1)
    for place_sums, error in ((lucky, 0.01), (unlucky, 0.5)):
        huge = 100.0
        place_sums.target_channels[5] += huge**2
        place_sums.target_fourths[5] += huge**4
        place_sums.own_channels[5] += (huge * error * rounding_unit(Dtype.BF16)) ** 2
    assert suspects(place("mlp.act_fn", 0, lucky, unlucky)) == []


@pytest.mark.parametrize("wrong", [None, "infer", "train"])
def test_a_place_that_is_to_give_zeros_is_suspect_only_where_it_does_not(wrong: str | None) -> None:
    sides = {name: side(0, size=60.0 if name == wrong else 0.0) for name in ("infer", "train")}
    for place_sums in sides.values():
        for sums in (
            place_sums.total.target_squares,
            place_sums.total.side_squares,
            place_sums.target_channels,
            place_sums.target_fourths,
        ):
            sums[:] = 0
        place_sums.total.side_squares[:] = place_sums.total.error_squares
        place_sums.total.along[:] = 0
    assert [suspect.side for suspect in suspects(place("mlp.down_proj", 0, **sides))] == ([wrong] if wrong else [])


def test_few_tokens_need_more_to_accuse() -> None:
    few = np.array([9.0])
    infer, train = side(0, size=4.0), side(1)
    assert suspects(place("mlp", 0, infer, train)) != []
    assert suspects(place("mlp", 0, replace(infer, channel_tokens=few), replace(train, channel_tokens=few))) == []
