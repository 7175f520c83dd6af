"""A step whose engine delivered no log-prob for a token: counted, and in no metric."""

import numpy as np
import pytest

from mismatch_probe.guards.sums import Metrics
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.sequences import MISSING_LOG_PROB
from mismatch_probe.train.parts import response_metrics
from mismatch_probe.train.rollouts import Rollout


def metrics(lost: float | None) -> Metrics:
    rollouts = []
    for row in range(4):
        log_mu = np.full(6, -0.7)
        if lost is not None and row == 2:
            log_mu[1] = lost
        sequence = TokenSequence(f"row-{row}", [1], [1] * 6)
        rollouts.append(Rollout(sequence, log_mu, f"prompt-{row}", 1.0, False, ""))
    given = response_metrics(rollouts, np.full(24, -0.71), np.full(24, 0.5))
    return {name: value for name, value in given.items() if name.startswith(("mismatch/", "policy/"))}


@pytest.mark.parametrize("lost", [MISSING_LOG_PROB, -20000.0, np.nan])
def test_a_missing_log_prob_is_counted_and_averaged_nowhere(lost: float) -> None:
    found = metrics(lost)
    counts = ("mismatch/nonfinite_tokens", "mismatch/missing_mu_tokens")
    measured = dict.fromkeys(counts, 1.0) | {"mismatch/left_out_share": pytest.approx(1 / 24)}
    measured |= {"mismatch/copied_share": 0.0, "mismatch/copied_rows_share": 0.0}
    measured |= {"mismatch/zero_tokens": 0.0, "mismatch/above_zero_tokens": 0.0}
    assert {name: value for name, value in found.items() if np.isfinite(value)} == measured


def test_a_step_without_one_is_measured() -> None:
    found = metrics(None)
    assert found["mismatch/nonfinite_tokens"] == 0
    assert found["mismatch/abs_logprob_diff"] == pytest.approx(0.01)
