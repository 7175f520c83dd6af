"""Responses that were not cut and do not end as responses end."""

import numpy as np
import pytest

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.parts import response_metrics
from mismatch_probe.train.rollouts import Rollout


def test_responses_that_were_not_cut_and_lack_their_end_are_counted() -> None:
    def rollout(last: int, *, truncated: bool) -> Rollout:
        return Rollout(TokenSequence("r", [1], [5, last]), np.full(2, -0.7), "p", 1.0, truncated, "")

    rollouts = [rollout(2, truncated=False), rollout(9, truncated=False), rollout(9, truncated=True)]
    log_pi, entropy = np.full(6, -0.71), np.full(6, 0.5)
    assert response_metrics(rollouts, log_pi, entropy, {2, 3})["response/unended_share"] == pytest.approx(1 / 3)
    assert response_metrics(rollouts, log_pi, entropy)["response/unended_share"] == 0
