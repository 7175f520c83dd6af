"""The benchmark of the cost model finds a total that its interval misses, and writes it so."""

from benchmarks.cost_model import Result, Stage, lines_of, outside
from mismatch_probe.compare.cost.roofline import Span


def result(wall_seconds: float) -> Result:
    span = Span.around(10.0, 2.0)
    stages = [Stage(name="sample-bf16", by_rates=span, by_runs=span, measured_seconds=wall_seconds)]
    return Result(
        case="few",
        stages=stages,
        total_by_rates=span,
        total_by_runs=span,
        wall_seconds=wall_seconds,
        predicted_bytes=2**30,
        seen_bytes=2**30,
    )


def test_what_was_measured_within_the_interval_passes() -> None:
    assert outside([result(6.0), result(19.0)]) == []
    assert "MISSED" not in "\n".join(lines_of([result(6.0)]))


def test_what_was_measured_outside_is_caught() -> None:
    for seconds in (4.9, 20.1):
        assert outside([result(seconds)]) == [f"few by rates: {seconds} s", f"few by runs: {seconds} s"]
        lines = lines_of([result(seconds)])
        assert sum("MISSED" in line for line in lines) == 2
        assert any("0 of 1 in their interval" in line for line in lines)
