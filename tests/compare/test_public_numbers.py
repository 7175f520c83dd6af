"""The benchmark of public laws, on simulated runs whose laws are known."""

from pathlib import Path

import pytest

from benchmarks.public_numbers import ABSENT, BF16, FP16, Run, error_ratio, laws, of_errors, outside_band
from mismatch_probe.dtypes import Dtype
from tests.simulated_run import ERROR_NATS, Simulation, simulated_run

BOTH = (BF16, FP16)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Of two pairs, 64 responses each."""
    return Run(simulated_run(tmp_path / "run", Simulation(pairs=BOTH)).path)


def value(estimate: str) -> float:
    return float(estimate.partition(" ")[0])


@pytest.mark.slow
def test_independent_errors_have_the_ratio_and_the_gap_that_they_were_made_with(run: Run) -> None:
    expected = ERROR_NATS[Dtype.BF16] / ERROR_NATS[Dtype.FP16]
    assert value(error_ratio("pi")(run)) == pytest.approx(expected, rel=0.15), "log-probs are cut at 0"
    findings = {law.name: law.find(run) for law in laws()}
    assert value(findings["rms gap / sqrt(a^2 + b^2), BF16"]) == pytest.approx(1, abs=0.05)
    assert value(findings["k3 / (rms^2 / 2), BF16"]) == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_one_side_that_errs_three_times_as_much_is_seen(tmp_path: Path) -> None:
    run = Run(simulated_run(tmp_path / "run", Simulation(pairs=BOTH, worse=3.0)).path)
    sides = of_errors(BF16, lambda pi, mu, *_: (pi / mu) ** 0.5)(run)
    assert value(sides) == pytest.approx(3, rel=0.15)


@pytest.mark.slow
def test_what_a_run_did_not_measure_is_absent(run: Run, tmp_path: Path) -> None:
    assert outside_band(BF16, "pi_again")(run) == ABSENT
    alone = Run(simulated_run(tmp_path / "alone", Simulation()).path)
    assert error_ratio("pi")(alone) == ABSENT
