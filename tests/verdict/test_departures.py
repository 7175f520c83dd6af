"""What the distances of a log's sides from a checkpoint make of the verdict."""

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.departures import Departures, beyond_format, other_checkpoint


def estimate(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.1 * value, 0.95, 32, 1000, "token", 8)


def departures(pi: float | None, mu: float, apart: float | None, *, named: bool = False) -> Departures:
    floors = {"mu": estimate(mu)} | ({} if pi is None else {"pi": estimate(pi)})
    return Departures(
        tuple(floors),
        floors,
        dict.fromkeys(floors, Dtype.BF16),
        None if apart is None else estimate(apart),
        from_checkpoint=True,
        is_named=named,
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (departures(1.0, 1.0, 1.4), []),
        (departures(20.0, 20.0, 1.4), ["other_checkpoint"]),
        (departures(None, 20.0, None), ["other_checkpoint"]),
        (departures(20.0, 1.0, 20.0), ["beyond_format"]),
        (departures(20.0, 20.0, 28.0), ["beyond_format"]),
        (departures(20.0, 20.0, 1.4, named=True), []),
    ],
)
def test_each_way_to_depart_has_its_code(found: Departures, expected: list[str]) -> None:
    verdict = other_checkpoint(found)
    codes = [cause.code for cause in beyond_format(found)] + ([] if verdict is None else [verdict.code])
    assert codes == expected
