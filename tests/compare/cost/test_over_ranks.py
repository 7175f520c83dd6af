"""What one of several ranks needs memory for, does and is sent, and what is not known of their time."""

from dataclasses import replace

import pytest

from mismatch_probe.compare.cost.earlier import Measurement, Pace
from mismatch_probe.compare.cost.forecast import Starting, forecast
from mismatch_probe.compare.cost.roofline import Work
from mismatch_probe.compare.cost.stage_work import key_of, rank_weight_bytes, received_by_rank, work_of
from mismatch_probe.compare.stages import ScoreStage
from tests.compare.cost.test_memory import SEVEN_BILLION
from tests.compare.cost.workloads import ARCHITECTURE, calibration, stage, workload

SIZES = replace(SEVEN_BILLION, layer_parameters=2 * 10**8, outside_parameters=10**9)


def test_fsdp2_gathers_two_layers_and_what_no_layer_holds_beside_a_rank_s_part() -> None:
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=1) == part + gathered


def test_ranks_that_divide_products_gather_nothing_of_each_other() -> None:
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=8) == 2 * SIZES.parameters / 8
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=2) == part + gathered / 2


SIDES = {"train": [{"name": "two", "dtype": "bf16", "ranks": 2}], "pairs": [("two", "bf16"), ("bf16", "bf16")]}


def test_what_ranks_send_each_other_is_told_until_a_run_over_as_many_tells_how_long_it_takes() -> None:
    stages = [stage(f"score-train-{name}", **SIDES) for name in ("two", "bf16")]
    starting, sizes = Starting(6.0, on_cpu=True), workload(**SIDES)
    unknown = forecast(stages, sizes, Pace(calibration(), []), starting)
    assert unknown.over_ranks == ["score-train-two"]
    assert unknown.received_bytes == {"score-train-two": ARCHITECTURE.parameters * 2 // 2}  # one pass, half of the BF16
    measured = [Measurement(key_of(known), Work(matrix_flops=1e9), 2.0, 1.0) for known in stages]
    assert forecast(stages, sizes, Pace(calibration(), measured), starting).received_bytes == {}
    assert forecast(stages, sizes, Pace(calibration(), measured[1:]), starting).over_ranks == ["score-train-two"]


@pytest.mark.parametrize(
    ("prompts", "ranks", "tensor_parallel", "share"),
    [(2048, 2, 1, 1 / 2), (2048, 8, 1, 1 / 8), (64, 64, 1, 1 / 2.1875), (64, 8, 8, 1 / 8), (2048, 8, 2, 1 / 8)],
)
def test_ranks_with_gpus_share_whole_passes_and_no_more_of_them_than_there_are(
    prompts: int, ranks: int, tensor_parallel: int, share: float
) -> None:
    """64 prompts are 2.2 passes of 2,048 tokens: 64 ranks are no faster than three."""
    sides = {"train": [{"name": "all", "dtype": "bf16", "ranks": ranks, "tensor_parallel": tensor_parallel}]}
    sides |= {"pairs": [("all", "bf16")]}
    on_cpu = workload(prompts=prompts, **sides)
    on_gpus = replace(on_cpu, ranks_share_cores=False)
    scoring = stage("score-train-all", **sides)
    on_one, each = work_of(scoring, on_cpu).matrix_flops, work_of(scoring, on_gpus).matrix_flops
    assert each == pytest.approx(share * on_one, rel=0.15)
    assert each >= on_one / ranks


@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_what_a_rank_is_sent_follows_from_its_passes_or_its_tokens(tensor_parallel: int) -> None:
    """16 passes of 2,048 tokens, in BF16."""
    sides = {"train": [{"name": "all", "dtype": "bf16", "ranks": 8, "tensor_parallel": tensor_parallel}]}
    sides |= {"pairs": [("all", "bf16")]}
    sizes = workload(prompts=512, prompt_tokens=14, architecture=SIZES, **sides)
    weights = 2 * 2 * SIZES.parameters * 7 / 8
    sums = 2 * 2 * SIZES.num_layers * SIZES.hidden_size * 32768 * 2 * 7 / 8
    scoring = stage("score-train-all", **sides)
    assert isinstance(scoring, ScoreStage)
    assert received_by_rank(scoring, sizes) == (weights if tensor_parallel == 1 else sums)
