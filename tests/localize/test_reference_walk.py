"""Errors of two recorded sides against FP32: exact where nothing differs, found where something does."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.activations import (
    ACTIVATION,
    ATTENTION,
    BLOCK,
    HEAD,
    ROTARY_KEYS,
    ROTARY_QUERIES,
    plan_activation_batches,
)
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.precision import undivided_modules
from mismatch_probe.training_path.scorer import Scorer
from tests.localize.bench import Bench, Held, some_sequences
from tests.localize.conftest import NUM_LAYERS
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-sliding", "qwen3-moe", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def twice(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Held]:
    """The BF16 side of a family held against itself, computed once."""

    @cache
    def held(family: str) -> Held:
        return Bench(checkpoint(family), tmp_path_factory.mktemp("twice"), batch_tokens=400).twice()

    return held


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_side_twice_is_exactly_zero(twice: Callable[[str], Held], family: str) -> None:
    held = twice(family)
    assert [error.between for error in held.errors] == [0.0] * len(held.errors)
    assert [error.infer.total for error in held.errors] == [error.train.total for error in held.errors]
    assert held.suspects == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_every_layer_is_a_place(twice: Callable[[str], Held], family: str) -> None:
    held = twice(family)
    expected = {BLOCK, ATTENTION, ROTARY_QUERIES, ROTARY_KEYS, "input_layernorm", "post_attention_layernorm", "mlp"}
    expected |= {f"self_attn.{name}_proj" for name in "qkvo"}
    expected |= {"mlp.gate"} if "moe" in family else {ACTIVATION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    expected |= {"self_attn.q_norm", "self_attn.k_norm"} if family.startswith("qwen3") else set()
    for layer in range(NUM_LAYERS):
        assert expected <= {error.place for error in held.errors if error.layer == layer}
    assert {error.place for error in held.errors if error.layer is None} == {"embed_tokens", "norm", HEAD}


def test_what_sequences_begin_with_alike_counts_once_by_channel(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ids = [*range(3, 250)]
    one, other = TokenSequence("one", ids[:3], ids[3:43]), TokenSequence("other", ids[43:47], ids[47:88])
    twin = replace(one, id="twin", token_ids=[*one.token_ids[:-2], 250, 250])
    bench = Bench(checkpoint("llama"), tmp_path)
    bench.batches = plan_activation_batches([one, other, twin], batch_tokens=64, logit_rows=10_000)
    held = bench.twice()
    tokens = [one.num_tokens - 1, other.num_tokens - 1, twin.num_tokens - 1]
    for place in held.places:
        by_channel = int(place.infer.own_by_number.tokens[0])
        if place.place == HEAD:
            assert by_channel == len(one.token_ids) + len(other.token_ids) + 1
        else:
            assert place.infer.total.tokens.tolist() == tokens
            assert by_channel == tokens[0] + tokens[1] + 1


def test_tokens_that_are_computed_alike_count_once_by_channel(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("llama"), tmp_path)
    one_id = [TokenSequence(f"s{number}", [7] * 3, [7] * (40 + number)) for number in range(3)]
    bench.batches = plan_activation_batches(one_id, batch_tokens=64, logit_rows=10_000)
    held = bench.twice()
    num_positions = max(sequence.num_tokens for sequence in one_id) - 1
    for place in held.places:
        assert place.train.total.tokens.sum() > 2 * num_positions
        by_channel = int(place.train.own_by_number.tokens[0])
        assert by_channel == (num_positions if place.place in (ROTARY_QUERIES, ROTARY_KEYS, ATTENTION) else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_fp32_side_errs_as_sums_in_another_order_do(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    bench = Bench(checkpoint(family), tmp_path, dtype=Dtype.FP32)
    held = bench.twice()
    assert max(error.infer.total.value for error in held.errors) < 1e-4
    assert max(error.infer.own.value for error in held.errors) < 1e-5


def test_a_16_bit_side_errs_in_every_block_by_about_its_rounding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("llama"), tmp_path, modules=False)
    held = bench.twice()
    assert [(error.layer, error.place) for error in held.errors] == [(0, BLOCK), (1, BLOCK), (None, "norm")]
    assert all(2.0**-10 < error.infer.own.value < 2.0**-6 for error in held.errors)
    assert held.errors[0].infer.own.value == pytest.approx(held.errors[0].infer.total.value, rel=0.05)
    assert all(error.infer.cosine > 0.999 for error in held.errors)


@pytest.mark.parametrize(("layer", "modules"), [(0, True), (1, True), (2, True), (1, False)])
def test_a_perturbation_in_layer_k_is_found_at_layer_k(tmp_path: Path, layer: int, modules: bool) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=3)
    bench = Bench(folder, tmp_path, modules=modules, batch_tokens=400)
    bench.record("clean")
    disturbed = undivided_modules(bench.model)[layer].mlp.down_proj.weight
    disturbed.data *= 1 + 0.05 * torch.randn(disturbed.shape, generator=torch.Generator().manual_seed(0))
    bench.record("disturbed")
    held = bench.hold("clean", "disturbed")
    (suspect,) = held.suspects
    assert (suspect.place, suspect.layers, suspect.side) == ("mlp.down_proj" if modules else BLOCK, [layer], "train")
    before = [error.between for error in held.errors if error.layer is not None and error.layer < layer]
    assert before == [0.0] * len(before)


def test_a_place_around_others_answers_for_what_it_adds_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("qwen3"), tmp_path)
    bench.record("clean")
    undivided_modules(bench.model)[1].self_attn.v_proj.weight.data *= 1.05
    bench.record("disturbed")
    held = bench.hold("clean", "disturbed")
    assert [(suspect.place, suspect.layers) for suspect in held.suspects] == [("self_attn.v_proj", [1])]
    around = next(place for place in held.places if (place.layer, place.place) == (1, "self_attn"))
    assert around.train.own_by_number.squares.sum() > 4 * around.infer.own_by_number.squares.sum()
    assert around.train.between_parts.squares.sum() < 1e-4 * around.train.own_by_number.squares.sum()


def test_a_fault_between_two_places_is_named_by_the_place_around_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("qwen3"), tmp_path)
    bench.record("clean")
    output_projection = undivided_modules(bench.model)[1].self_attn.o_proj
    output_projection.register_forward_pre_hook(lambda _, args: (args[0] * 1.05,))
    bench.record("disturbed")
    suspects = bench.hold("clean", "disturbed").suspects
    assert [(suspect.place, suspect.layers, suspect.side) for suspect in suspects] == [("self_attn", [1], "train")]


def test_recording_does_not_change_what_is_computed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In batches of like lengths. The scorer makes several passes of unlike ones, whose sums round otherwise."""
    folder = checkpoint("qwen3")
    bench = Bench(folder, tmp_path, batch_tokens=400)
    recorded = bench.record("once")
    with Scorer.load(folder, Dtype.BF16, TrainingPathSettings()) as scorer:
        plain = [one for batch in bench.batches for one in scorer.score_batch(batch.sequences)]
    assert [one.id for one in recorded] == [one.id for one in some_sequences()]
    for one, other in zip(recorded, plain, strict=True):
        assert np.array_equal(one.logprobs, other.logprobs)


def test_nothing_is_left_behind_on_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("llama"), tmp_path)
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    bench.twice()
    assert before == ALL_ATTENTION_FUNCTIONS._local_mapping
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bench.model.modules())


def test_other_experts_are_counted_where_routers_differ(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("qwen3-moe"), tmp_path)
    bench.record("clean")
    router = undivided_modules(bench.model)[1].mlp.gate
    router.weight.data = router.weight.data.roll(1, dims=0)
    bench.record("disturbed")
    held = bench.hold("clean", "disturbed")
    shares = {router.layer: router.sides.sum() / router.tokens.sum() for router in held.routers}
    assert shares[0] == 0.0
    assert shares[1] > 0.3
    assert [(suspect.place, suspect.layers) for suspect in held.suspects] == [("mlp.gate", [1])]


def test_a_side_that_overflows_is_named_instead_of_measured(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bench = Bench(checkpoint("llama"), tmp_path, dtype=Dtype.FP16, modules=False)
    bench.record("clean")
    undivided_modules(bench.model)[1].mlp.down_proj.weight.data *= 2e4
    bench.record("overflowing")
    with pytest.raises(BrokenRecord, match=r"training path computes at model\.layers\.1 is not finite in fp16"):
        bench.hold("clean", "overflowing")


class _OneRounding:
    """A tiny model's training path, and the same with norms as a kernel has them that rounds their product alone.

    transformers' own rounds the normalised numbers, too. The weights are the number below 2: products of it with
    numbers of 16 bits are rounded towards zero on average.
    """

    def __init__(self, family: str, scratch: Path, dtype: Dtype) -> None:
        folder = make_checkpoint(scratch / "checkpoint", family, num_hidden_layers=2)
        below_2 = 2 - 2 * dtype.round_off
        file = folder / "model.safetensors"
        weights = {
            name: torch.full_like(tensor, below_2) if "norm" in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
        self.bench = Bench(folder, scratch, dtype)
        self.norms = [module for name, module in self.bench.model.named_modules() if name.endswith("norm")]
        self.mean_square = 0.0
        handle = self.bench.model.base_model.norm.register_forward_pre_hook(self._measure)
        self.bench.record("twice")
        handle.remove()

    def _measure(self, _: Any, args: tuple[Tensor]) -> None:
        self.mean_square = float(args[0].float().square().mean())

    def record_once(self, side: str) -> None:
        handles = [norm.register_forward_hook(_rounded_once) for norm in self.norms]
        self.bench.record(side)
        for handle in handles:
            handle.remove()


def _rounded_once(norm: Any, args: tuple[Tensor], _: Tensor) -> Tensor:
    numbers = args[0].float()
    normalised = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (normalised * norm.weight.float()).to(args[0].dtype)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_norm_that_rounds_twice_beside_one_that_rounds_once_is_no_fault(
    family: str, dtype: Dtype, tmp_path: Path
) -> None:
    sides = _OneRounding(family, tmp_path, dtype)
    sides.record_once("once")
    for pair in (("once", "twice"), ("twice", "once")):
        held = sides.bench.hold(*pair)
        assert held.suspects == []
        norm = held.error(None, "norm")
        made = abs(norm.infer.scale.value - norm.train.scale.value)
        assert made == pytest.approx(abs(norm.infer.scale_of_extra_rounding), rel=0.05)
        assert made > dtype.round_off / 4, "what accused these norms"


@pytest.mark.parametrize("wrong_side", ["once", "twice"])
@pytest.mark.parametrize("fault", ["epsilon", "weight"])
def test_a_norm_that_is_wrong_is_named_though_the_sides_round_otherwise(
    wrong_side: str, fault: str, tmp_path: Path
) -> None:
    sides = _OneRounding("llama", tmp_path, Dtype.BF16)
    sides.record_once("once")
    norm: Any = sides.bench.model.base_model.norm
    if fault == "epsilon":
        norm.variance_epsilon += 0.01 * sides.mean_square
    else:
        norm.weight.data = norm.weight.data * 0.995
    {"once": sides.record_once, "twice": sides.bench.record}[wrong_side]("wrong")
    for pair in (("wrong", "twice" if wrong_side == "once" else "once"), ("once", "wrong"), ("twice", "wrong")):
        (suspect,) = sides.bench.hold(*pair).suspects
        assert (suspect.place, suspect.side) == ("norm", "infer" if pair[0] == "wrong" else "train")
