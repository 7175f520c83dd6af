import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mismatch_probe.dtypes import FP16_LARGEST, FP16_ROUNDS_TO_INFINITY, fp16_margin_bits
from mismatch_probe.headroom.ranges import Binades, ForwardRanges, Operation, merged_binades

HERE = Operation("layer", "add", 0)


def binades(*values: float) -> Binades:
    counted = Binades()
    counted.add(torch.tensor(values))
    return counted


@pytest.mark.slow
@given(
    st.lists(st.floats(min_value=-(2.0**20), max_value=2.0**20, width=32), min_size=1, max_size=50),
    st.integers(min_value=0, max_value=24),
)
def test_what_is_flushed_is_what_fp16_flushes(values: list[float], exponent: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    scaled = tensor.double() * 2.0**exponent
    flushed = int(((scaled.half() == 0) & (tensor != 0)).sum())
    assert binades(*values).flushed_share(exponent) * max(1, int((tensor != 0).sum())) == pytest.approx(flushed)


def test_powers_of_two_fall_on_the_side_that_rounding_puts_them() -> None:
    assert binades(2.0**-25).flushed_share(0) == 1
    assert binades(2.0**-25 * (1 + 2.0**-20)).flushed_share(0) == 0
    assert binades(2.0**-25).flushed_share(1) == 0
    assert binades(2.0**-14).subnormal(0) == 1
    assert binades(2.0**-14 * 1.001).subnormal(0) == 0


def test_zeros_are_no_gradient_that_underflows() -> None:
    counted = binades(0.0, 0.0, -0.0, 1.0)
    assert counted.num_nonzero == 1
    assert counted.flushed_share(0) == 0


def test_parts_add_up() -> None:
    parts = [binades(1.0, 1e-9), binades(4.0), Binades()]
    together = merged_binades(parts)
    assert together.num_nonzero == 3
    assert together.largest == 4.0
    assert together.flushed_share(0) == pytest.approx(1 / 3)


def test_margin_is_in_doublings() -> None:
    assert fp16_margin_bits(FP16_LARGEST / 8) == 3
    assert fp16_margin_bits(FP16_LARGEST * 2) == -1
    assert fp16_margin_bits(0.0) is None
    limit = torch.tensor([FP16_ROUNDS_TO_INFINITY, FP16_ROUNDS_TO_INFINITY - 1])
    assert limit.half().isinf().tolist() == [True, False]


def test_the_largest_magnitude_of_all_batches_is_kept() -> None:
    ranges = ForwardRanges()
    for value in (1.0, -7.0, 3.0):
        ranges.see(HERE, torch.full((2, 3), value))
    assert ranges.largest() == {HERE: 7.0}


def test_a_nan_in_one_batch_is_never_lost() -> None:
    ranges = ForwardRanges()
    for value in (1.0, float("nan"), 3.0):
        ranges.see(HERE, torch.tensor([value]))
    assert ranges.largest()[HERE] != ranges.largest()[HERE]


def test_an_outlier_channel_stands_out() -> None:
    ranges = ForwardRanges(frozenset({"layer"}))
    hidden = torch.ones(2, 3, 8)
    hidden[1, 2, 5] = -40.0
    ranges.see(HERE, hidden)
    channels = ranges.channels()["layer"]
    assert int(channels.argmax()) == 5
    assert float(channels.max() / channels.median()) == 40


def test_results_too_small_for_fp16_show_a_large_rounding_error() -> None:
    ranges = ForwardRanges()
    small = Operation("mlp", "mul", 0)
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    ranges.see(HERE, values)
    ranges.see(small, values * 2.0**-22)
    errors = ranges.rounding_errors()
    assert errors[HERE] < 2.0**-11
    assert errors[small] > 2.0**-4
