"""Rounding accuses nobody; one wrong row, one wrong constant, one better side are named. On simulated sums."""

import numpy as np
import pytest
import torch

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.run import place_errors
from mismatch_probe.localize.suspects import PlaceNames, find_suspects, rounding_unit
from mismatch_probe.records.activations import PlaceSums, SideSums
from mismatch_probe.records.findings import Suspect
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.sequences import Sequences
from mismatch_probe.training_path.inside.totals import Formats, OwnTarget, SideTotals

NUM_SEQUENCES, TOKENS_EACH, CHANNELS = 12, 40, 64
NAMES = PlaceNames([f"model.layers.{i}" for i in range(4)], [f"model.layers.{i}" for i in range(4)], {})


def side(
    seed: int,
    *,
    size: float = 1.0,
    dtype: Dtype = Dtype.BF16,
    scale: float = 0.0,
    rows: dict[int, float] | None = None,
    num_tokens: int = NUM_SEQUENCES * TOKENS_EACH,
    target: np.ndarray | None = None,
    sink: float = 0.0,
) -> SideSums:
    """Own errors of `size` roundings, an output `scale` too long, and channels of `rows` times the error.

    `sink`: the first token has 10,000 times the usual size in channel 5, and an error of so many roundings there.
    """
    random = np.random.default_rng(seed)
    if target is None:
        target = np.random.default_rng(99).standard_normal((num_tokens, CHANNELS))
    unit = size * rounding_unit(dtype)
    error = random.standard_normal(target.shape) * unit * np.abs(target) / 2 + scale * target
    for row, times in (rows or {}).items():
        error[:, row] *= times
    if sink:
        target = target.copy()
        target[0, 5] = 1e4
        error[0, 5] = 1e4 * sink * rounding_unit(dtype)
    return sums_of(target + error, target, dtype)


def sums_of(
    returned: np.ndarray, target: np.ndarray, dtype: Dtype = Dtype.BF16, norm_weights: np.ndarray | None = None
) -> SideSums:
    """From [T, C] in FP32, as the walk has them."""
    totals = SideTotals(NUM_SEQUENCES, target.shape[1])
    sequences = torch.arange(len(target)) * NUM_SEQUENCES // len(target)
    exact, rounded = (torch.from_numpy(array).float() for array in (target, returned))
    weights = None if norm_weights is None else torch.from_numpy(norm_weights).float()
    own = OwnTarget(exact, torch.ones(len(target), dtype=torch.bool), norm_weights_C=weights)
    totals.add(sequences, rounded, exact, own, Formats(getattr(torch, dtype.torch_name), torch.bfloat16))
    return totals.finish()


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
    target = np.random.default_rng(2).standard_normal((NUM_SEQUENCES * TOKENS_EACH, CHANNELS))
    if row is not None:
        target[:, row] *= 10
    exact, rounded = side(0, size=0.0, target=target), side(1, size=1.5, target=target)
    assert suspects(place("mlp.up_proj", 0, exact, rounded), infer=Dtype.FP32) == []
    assert suspects(place("mlp.up_proj", 0, rounded, exact), train=Dtype.FP32) == []


def test_luck_of_one_of_two_formats_in_a_channel_is_no_fault() -> None:
    lucky = side(0, dtype=Dtype.FP16, rows={22: 0.2})
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
    (suspect,) = suspects(place("lm_head", None, side(0), side(1, rows={17: 10.0})))
    assert (suspect.place, suspect.side, suspect.channel) == ("lm_head", "train", 17)


def test_a_side_in_higher_precision_is_told_from_a_wrong_one() -> None:
    (suspect,) = suspects(place("mlp.gate", 1, side(0, size=1e-3), side(1)))
    assert suspect.side == "train"
    assert "higher precision" in suspect.sentence


@pytest.mark.parametrize("chops", ["infer", "train"])
def test_a_side_that_chops_is_not_accused_and_one_that_errs_by_more_is(chops: str) -> None:
    """Numbers just below one that BF16 has: rounded to nearest they are right, and chopped a whole spacing off."""
    numbers = np.random.default_rng(3).standard_normal((NUM_SEQUENCES * TOKENS_EACH, CHANNELS)).astype(np.float32)
    target = torch.from_numpy(numbers).bfloat16().float().numpy() * np.float32(1 - 2.0**-13)
    nearest = torch.from_numpy(target).bfloat16().float().numpy()
    chopped = (target.view(np.int32) & -(1 << 16)).view(np.float32)
    other = {"infer": "train", "train": "infer"}[chops]
    innocent = {chops: sums_of(chopped, target), other: sums_of(nearest, target)}
    assert suspects(place("self_attn.rotary_emb[q]", 0, **innocent)) == []
    guilty = {chops: sums_of(target + 2 * (chopped - target), target), other: sums_of(nearest, target)}
    assert [one.side for one in suspects(place("self_attn.rotary_emb[q]", 0, **guilty))] == [chops]


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


def test_luck_in_rounding_one_huge_number_of_one_token_accuses_nobody() -> None:
    assert suspects(place("mlp.act_fn", 0, side(0, sink=1e-4), side(1, sink=1.0))) == []
    assert suspects(place("input_layernorm", 0, side(0, sink=1.0), side(1, sink=-1.0))) == []


def test_a_fault_is_seen_behind_a_huge_number_of_one_token() -> None:
    (suspect,) = suspects(place("mlp.down_proj", 0, side(0, sink=1.0, size=5.0), side(1, sink=1.0)))
    assert (suspect.side, suspect.channel) == ("infer", None)


def test_errors_are_relative_token_by_token() -> None:
    target = np.ones((4, CHANNELS))
    target[0] = 1e4
    error = np.full_like(target, 0.01)
    error[0] = 0.0
    own = sums_of(target + error, target).own
    assert own.error_squares.sum() / own.tokens.sum() == pytest.approx(0.75 * 0.01**2, rel=1e-4)


@pytest.mark.parametrize("wrong", [None, "infer", "train"])
def test_a_place_that_is_to_give_zeros_is_suspect_only_where_it_does_not(wrong: str | None) -> None:
    zeros = np.zeros((NUM_SEQUENCES * TOKENS_EACH, CHANNELS))
    noise = np.random.default_rng(0).standard_normal(zeros.shape)
    sides = {name: sums_of(noise if name == wrong else zeros, zeros) for name in ("infer", "train")}
    assert [suspect.side for suspect in suspects(place("mlp.down_proj", 0, **sides))] == ([wrong] if wrong else [])


def test_few_tokens_need_more_to_accuse() -> None:
    assert suspects(place("mlp", 0, side(0, size=4.0), side(1))) != []
    few = {"num_tokens": NUM_SEQUENCES}
    assert suspects(place("mlp", 0, side(0, size=4.0, **few), side(1, **few))) == []


def bf16(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).bfloat16().float().numpy()


@pytest.mark.parametrize("rounds_once", ["infer", "train"])
def test_luck_of_one_rounding_in_few_numbers_is_no_fault_of_a_norm_and_a_wrong_weight_is(rounds_once: str) -> None:
    """A norm behind the embeddings of few ids: a channel has as many numbers, which one side rounds once more."""
    random = np.random.default_rng(0)
    weights = bf16(random.uniform(0.9, 1.15, 512).astype(np.float32))
    numbers = np.tile(random.standard_normal((6, 512)).astype(np.float32), (80, 1))
    target = numbers * weights
    returned = {"once": bf16(target), "twice": bf16(bf16(numbers) * weights)}
    other = {"infer": "train", "train": "infer"}[rounds_once]

    def sides(norm_weights: np.ndarray | None) -> dict[str, SideSums]:
        of = {rounds_once: "once", other: "twice"}
        return {side: sums_of(returned[name], target, norm_weights=norm_weights) for side, name in of.items()}

    assert [one.side for one in suspects(place("self_attn.q_norm", 0, **sides(None)))] == [other], "what accused it"
    assert suspects(place("self_attn.q_norm", 0, **sides(weights))) == []
    returned["twice"][:, 17] *= 1.02
    (suspect,) = suspects(place("self_attn.q_norm", 0, **sides(weights)))
    assert (suspect.side, suspect.channel) == (other, 17)
