"""The grid of an ablation: its cells, their names, and what is refused."""

from typing import Any

import pytest

from mismatch_probe.config.ablate import Ablation
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

BASE: dict[str, Any] = {"model": {"path": "demo"}, "steps": 4}


def ablation(*grids: dict[str, Any], **changes: Any) -> Ablation:
    return Ablation.of({**BASE, **changes, "grid": list(grids)})


def names(*grids: dict[str, Any], **changes: Any) -> list[str]:
    return [cell.name for cell in ablation(*grids, **changes).cells]


def test_every_combination_is_run_with_every_seed_and_all_variants_with_the_first_seed_first() -> None:
    assert names({"precision": ["bf16/fp16", "fp16"], "seed": [3, 1]}) == [
        "bf16-fp16.seed-3",
        "fp16-fp16.seed-3",
        "bf16-fp16.seed-1",
        "fp16-fp16.seed-1",
    ]


def test_each_axis_sets_its_setting() -> None:
    grid = {
        "precision": ["bf16/fp32"],
        "objective": ["gspo"],
        "learning_rate": [1e-3],
        "updates": [4],
        "lora_rank": [8],
        "max_new_tokens": [9],
        "further": {"optimizer.max_grad_norm": [0.5]},
        "seed": [7, 8],
    }
    cell, _ = ablation(grid).cells
    settings = cell.settings
    assert (settings.train_dtype, settings.infer_dtype) == (Dtype.BF16, Dtype.FP32)
    assert settings.objective.name == "gspo"
    assert (settings.optimizer.learning_rate, settings.optimizer.max_grad_norm) == (1e-3, 0.5)
    assert (settings.rollout.updates, settings.rollout.max_new_tokens, settings.seed) == (4, 9, 7)
    assert settings.policy.lora is not None
    assert settings.policy.lora.rank == 8


def test_an_axis_with_one_value_is_in_no_name() -> None:
    assert names({"precision": ["bf16"], "objective": ["grpo", "gspo"]}) == ["grpo.seed-0", "gspo.seed-0"]


def test_rank_0_trains_all_weights_whatever_the_settings_name() -> None:
    lora = {"policy": {"lora": {"rank": 4}}}
    full, adapters = ablation({"lora_rank": [0, 4]}, **lora).cells
    assert full.settings.policy.lora is None
    assert adapters.settings.policy.lora is not None


def test_a_cell_of_two_grids_is_run_once() -> None:
    assert names({"precision": ["bf16", "fp16"]}, {"precision": ["fp16", "fp32"]}) == [
        "bf16-bf16.seed-0",
        "fp16-fp16.seed-0",
        "fp32-fp32.seed-0",
    ]


def test_cells_that_differ_in_their_seed_alone_are_a_variant() -> None:
    variants = ablation({"precision": ["bf16", "fp16"], "objective": ["grpo"], "seed": [0, 1]}).variants()
    assert {label: [cell.settings.seed for cell in cells] for label, cells in variants.items()} == {
        "BF16/BF16": [0, 1],
        "FP16/FP16": [0, 1],
    }


@pytest.mark.parametrize(
    ("grids", "why"),
    [
        ([{}], "nothing varies in the grid; give --precision"),
        ([{"precision": ["bf16"], "seed": [3]}], "or run the one cell with `train`"),
        ([{"precision": ["bf16", "bf17"]}], "bf17"),
        ([{"precison": ["bf16"]}], "'precison' is unknown; did you mean 'precision'"),
        ([{"seed": [1, -1]}], "seed"),
        ([{"precision": ["bf16", "fp64"]}], "cell fp64-fp64.seed-0"),
        ([{"further": {"task.reward": ["module:function"]}}], "set it for all cells, outside of the grid"),
        ([{"objective": ["grpo"], "seed": [0]}, {"objective": ["gspo"], "further": {"steps": ["x"]}}], "steps"),
    ],
)
def test_a_grid_that_cannot_be_used_is_refused_in_one_sentence(grids: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(UsageError) as refusal:
        ablation(*grids)
    assert why in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_no_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no model to train; give --model"):
        Ablation.of({"grid": {"seed": [0]}})
