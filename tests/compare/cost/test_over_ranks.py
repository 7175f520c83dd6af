"""The weights that one of several ranks needs memory for, and what is not known of their time."""

from dataclasses import replace

from mismatch_probe.compare.cost.earlier import Measured
from mismatch_probe.compare.cost.forecast import Starting, forecast
from mismatch_probe.compare.cost.over_ranks import rank_weight_bytes
from mismatch_probe.compare.cost.pace import Pace
from mismatch_probe.compare.cost.rates import Work
from mismatch_probe.compare.cost.stage_work import what_of
from tests.compare.cost.test_memory import SEVEN_BILLION
from tests.compare.cost.workloads import calibration, stage, workload

SIZES = replace(SEVEN_BILLION, layer_parameters=2 * 10**8, outside_parameters=10**9)


def test_fsdp2_gathers_two_layers_and_what_no_layer_holds_beside_a_rank_s_part() -> None:
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=1) == part + gathered


def test_ranks_that_divide_products_gather_nothing_of_each_other() -> None:
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=8) == 2 * SIZES.parameters / 8
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=2) == part + gathered / 2


def test_stages_over_ranks_are_said_to_be_foretold_as_of_one_process_until_a_run_over_as_many_tells() -> None:
    sides = {"train": [{"name": "two", "dtype": "bf16", "ranks": 2}], "pairs": [("two", "bf16"), ("bf16", "bf16")]}
    stages = [stage(f"score-train-{name}", **sides) for name in ("two", "bf16")]
    starting, sizes = Starting(6.0, on_cpu=True), workload(**sides)
    assert forecast(stages, sizes, Pace(calibration(), []), starting).over_ranks == ["score-train-two"]
    measured = [Measured(what_of(known), Work(matrix_flops=1e9), 2.0, 1.0) for known in stages]
    assert forecast(stages, sizes, Pace(calibration(), measured), starting).over_ranks == []
    assert forecast(stages, sizes, Pace(calibration(), measured[1:]), starting).over_ranks == ["score-train-two"]
