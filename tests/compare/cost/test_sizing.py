"""The sizing report: sizes are what they are called, an extrapolation is the model's times what smaller sizes took."""

import pytest

from benchmarks.sizing.models import CHECKED, LARGE, MEASURED, large_architecture
from benchmarks.sizing.prediction import Task
from benchmarks.sizing.publish import Measurement, page, worst_of_checked


def measurement(size: str, way: str, *, seconds: float, peak_bytes: int) -> Measurement:
    return Measurement(
        size=size,
        way=way,
        parameters=1,
        seconds=seconds,
        predicted_seconds=10.0,
        peak_bytes=peak_bytes,
        predicted_bytes=10**9,
    )


def measured(last_seconds: float) -> list[Measurement]:
    """Three sizes that take twice what is predicted, and a fourth."""
    (last,) = CHECKED
    smaller = [measurement(size, "whole", seconds=20, peak_bytes=5 * 10**8) for size in MEASURED]
    return [*smaller, measurement(last, "whole", seconds=last_seconds, peak_bytes=5 * 10**8)]


@pytest.mark.parametrize(("last_seconds", "factor"), [(20, 1), (60, 3), (5, 4)])
def test_the_last_size_is_held_against_what_the_smaller_ones_took(last_seconds: float, factor: float) -> None:
    assert worst_of_checked(measured(last_seconds)) == pytest.approx(factor)


@pytest.mark.slow
def test_the_large_models_have_the_sizes_in_their_names_and_their_predictions_are_called_so() -> None:
    sizes = {name.split("B")[0]: large_architecture(name).parameters for name in LARGE}
    assert {int(billions): round(parameters / 1e9) for billions, parameters in sizes.items()} == {
        7: 8,
        70: 71,
        600: 597,
    }
    text = page(measured(20), Task(4, 32, 96, 512))
    assert "Predicted: no GPU was measured" in text
    assert all(f"| {name} | reference layer by layer on one GPU | 1 |" in text for name in LARGE)
