"""Guards speak to people: of the loss, not of `optim/loss`."""

import math

import pytest

from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.guards.rules.base import metric_words, not_a_number

METRICS = sorted(
    {
        name
        for guard in DEFAULT_GUARDS
        for name in guard.metrics
        if name not in (getattr(guard, "error", None), getattr(guard, "other_error", None))
    }
)
"""All but the standard errors that some are held against: no sentence names these."""


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_of_the_default_guards_has_words(name: str) -> None:
    assert not set("/_") & set(metric_words(name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optim/loss", "the loss"),
        ("mismatch/kl_k3", "KL (k3)"),
        ("mismatch/ess_token", "ESS of tokens"),
        ("judge/my_score", "judge/my_score"),
        ("mismatch/my_own", "mismatch/my_own"),
    ],
)
def test_a_metric_of_ones_own_keeps_its_name(name: str, words: str) -> None:
    assert metric_words(name) == words
    breach = not_a_number(name, math.nan, 0.0)
    assert breach is not None
    assert breach.sentence == f"{words} is NaN, so it keeps no limit"
    assert breach.metric == name
