import pytest

from mismatch_probe.gate.decide import holm_rejected


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [True, False, False, True]),
        ([0.01, 0.02, 0.03, 0.005], [True, True, True, True]),
        ([0.02, 0.02], [True, True]),
        ([0.03, 0.03], [False, False]),
        ([], []),
    ],
)
def test_steps_down_from_the_smallest_p_value(p_values: list[float], rejected: list[bool]) -> None:
    assert holm_rejected(p_values, lambda share: 0.05 / share) == rejected


def test_a_large_p_value_stops_the_procedure_for_all_larger_ones() -> None:
    assert holm_rejected([0.03, 0.04, 0.9], lambda share: 0.05 / share) == [False, False, False]
