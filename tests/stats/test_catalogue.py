"""Every metric that is computed has its entry in the catalogue, and no entry is of a metric that is not."""

import pytest

from mismatch_probe.gate.claims import known_metrics
from mismatch_probe.stats.catalogue import METRICS, facts_of, metric_meaning, metric_words
from mismatch_probe.stats.metrics import pair_metrics
from tests.stats.pairs import clustered_pair


def test_every_metric_has_words_and_a_meaning_of_its_own() -> None:
    names = known_metrics()
    assert [name for name in names if facts_of(name) is None] == []
    assert [name for name in names if not metric_meaning(name) or metric_words(name) == name.replace("_", " ")] == []
    assert len({metric_words(name) for name in names}) == len(names)


def test_no_entry_is_of_a_metric_that_is_not_computed() -> None:
    used = {name for name in known_metrics() if name in METRICS}
    assert METRICS.keys() - used == {"abs_logprob_diff_p", "outside_band_"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("abs_logprob_diff_p99_9", "p99.9 of |d|"),
        ("outside_band_0.5_2", "the share of tokens outside [0.5, 2]"),
        ("kl_k3", "KL (k3)"),
        ("somebody_s_own", "somebody s own"),
    ],
)
def test_quantiles_and_bands_have_their_numbers_in_their_words(name: str, words: str) -> None:
    assert metric_words(name) == words


def test_every_value_lies_in_the_range_of_its_entry() -> None:
    estimates, _ = pair_metrics(clustered_pair(12, seed=5))
    for name, estimate in estimates.items():
        facts = facts_of(name)
        assert facts is not None
        assert facts.least <= estimate.value <= facts.most, name
