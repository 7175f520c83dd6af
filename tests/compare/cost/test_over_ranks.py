"""The weights that one of several ranks needs memory for."""

from dataclasses import replace

from mismatch_probe.compare.cost.over_ranks import rank_weight_bytes
from tests.compare.cost.test_memory import SEVEN_BILLION

SIZES = replace(SEVEN_BILLION, layer_parameters=2 * 10**8, outside_parameters=10**9)


def test_fsdp2_gathers_two_layers_and_what_no_layer_holds_beside_a_rank_s_part() -> None:
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=1) == part + gathered


def test_ranks_that_divide_products_gather_nothing_of_each_other() -> None:
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=8) == 2 * SIZES.parameters / 8
    part, gathered = 2 * SIZES.parameters / 8, 2 * (10**9 + 2 * 2 * 10**8)
    assert rank_weight_bytes(SIZES, 2, ranks=8, tensor_parallel=2) == part + gathered / 2
