import numpy as np
import pytest
from scipy import stats

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Interval, Jackknife, Scale, Tail, interval, jackknife, ratio, share_interval
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import LEVEL
from mismatch_probe.stats.sequences import Sequences
from tests.stats.pairs import clustered_pair


def widths(bounds: Interval) -> float:
    assert bounds.low is not None
    assert bounds.high is not None
    return bounds.high - bounds.low


def test_the_jackknife_of_a_mean_is_the_textbook_standard_error():
    values = np.random.default_rng(0).normal(3, 2, 50)
    estimate = jackknife(ratio, np.stack([values, np.ones(50)]))
    assert estimate is not None
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.error == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_light_tails_give_student_t_with_one_degree_less_than_the_clusters():
    values = np.random.default_rng(0).uniform(-1, 1, 30)
    estimate = jackknife(ratio, np.stack([values, np.ones(30)]))
    assert estimate is not None
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    bounds = interval(estimate, Scale.SIGNED, 0.95)
    assert (bounds.low, bounds.high) == pytest.approx((expected.low, expected.high))


def test_heavier_tails_leave_fewer_degrees_of_freedom():
    light, heavy = (Jackknife(0.5, 0.1, kurtosis, 64) for kurtosis in (3.0, 20.0))
    assert light.degrees(Tail(1.0)) == 63
    assert 2 <= heavy.degrees(Tail(3.0)) < heavy.degrees(Tail(1.0)) < 63
    for scale in Scale:
        assert widths(interval(heavy, scale, 0.95)) > widths(interval(light, scale, 0.95))


def test_a_hidden_tail_of_a_positive_quantity_lies_above_it_and_that_of_a_ratio_on_either_side():
    heavy = Jackknife(1.0, 0.1, 20.0, 64)
    reaches = {}
    for scale in (Scale.POSITIVE, Scale.WEIGHTS, Scale.RATIO):
        bounds = interval(heavy, scale, 0.95)
        reaches[scale] = -np.log(bounds.low), np.log(bounds.high)  # type: ignore[arg-type]
    students = stats.t.ppf(0.975, 63) * 0.1
    assert reaches[Scale.POSITIVE][0] == pytest.approx(students)
    assert reaches[Scale.WEIGHTS][0] == pytest.approx(students)
    assert students < reaches[Scale.POSITIVE][1] < reaches[Scale.WEIGHTS][1]
    assert reaches[Scale.RATIO][0] == pytest.approx(reaches[Scale.RATIO][1])


@pytest.mark.parametrize("kurtosis", [3.0, 20.0])
def test_a_bound_reaches_farther_the_surer_it_is_to_be(kurtosis: float):
    for scale in (Scale.POSITIVE, Scale.WEIGHTS, Scale.RATIO, Scale.SIGNED):
        intervals = [interval(Jackknife(1.0, 0.1, kurtosis, 64), scale, level) for level in (0.5, 0.9, 0.99)]
        lows, highs = [bounds.low for bounds in intervals], [bounds.high for bounds in intervals]
        assert lows == sorted(lows, reverse=True)  # type: ignore[type-var]
        assert highs == sorted(highs)  # type: ignore[type-var]


def test_clusters_widen_an_interval_that_tokens_alone_would_make_too_narrow():
    random = np.random.default_rng(0)
    values = np.repeat(random.normal(size=40), 100) + 0.1 * random.normal(size=4000)
    by_sequence = Estimator(Sequences.of_lengths(np.full(40, 100))).mean(values, "token")
    by_token = Estimator(Sequences.of_lengths(np.ones(4000, dtype=int))).mean(values, "token")
    assert by_sequence is not None
    assert by_token is not None
    assert by_sequence.value == pytest.approx(by_token.value)
    assert widths(by_sequence) > 5 * widths(by_token)  # type: ignore[arg-type]


def test_samples_of_one_prompt_count_as_one_cluster():
    values = np.repeat(np.random.default_rng(0).normal(size=20), 4)
    apart = Estimator(Sequences.of_lengths(np.ones(80, dtype=int))).mean(values, "sequence")
    together = Estimator(Sequences.of_lengths(np.ones(80, dtype=int), np.arange(80) // 4)).mean(values, "sequence")
    assert apart is not None
    assert together is not None
    assert widths(together) > 1.8 * widths(apart)  # type: ignore[arg-type]


def test_one_cluster_has_a_value_and_no_interval():
    estimate = Estimator(Sequences.of_lengths([5, 5], clusters=[1, 1])).mean(np.arange(10.0), "token")
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (4.5, None, None)


def test_a_positive_quantity_never_gets_a_negative_bound():
    estimate = jackknife(ratio, np.stack([np.array([0.0, 0.0, 0.0, 9.0]), np.ones(4)]))
    assert estimate is not None
    bounds = interval(estimate, Scale.POSITIVE, 0.95)
    assert bounds.low is not None
    assert bounds.low > 0
    assert interval(estimate, Scale.SIGNED, 0.95).low < 0  # type: ignore[operator]


@pytest.mark.parametrize(("events", "units"), [(3, 60), (17, 60), (59, 60)])
def test_the_share_of_single_units_is_clopper_and_pearsons(events: int, units: int):
    column = np.zeros(units)
    column[:events] = 1
    estimate = jackknife(ratio, np.stack([column, np.ones(units)]))
    assert estimate is not None
    bounds = share_interval(estimate, units, 0.95)
    exact = stats.binomtest(events, units).proportion_ci(0.95, method="exact")
    assert (bounds.low, bounds.high) == pytest.approx((exact.low, exact.high), rel=0.1)


def test_no_event_is_not_proof_of_none():
    mask = np.zeros(6400, dtype=bool)
    share = Estimator(Sequences.of_lengths(np.full(64, 100))).share(mask, "token")
    assert share.low == 0
    assert share.high == pytest.approx(1 - ((1 - LEVEL) / 2) ** (1 / 64))
    every = Estimator(Sequences.of_lengths(np.full(64, 100))).share(~mask, "token")
    assert (every.low, every.high) == pytest.approx((1 - share.high, 1.0))


def test_a_wider_level_gives_a_wider_interval_for_every_metric():
    pair = clustered_pair(24, seed=2)
    narrow, wide = pair_metrics(pair, 0.8)[0], pair_metrics(pair, 0.99)[0]
    for name, estimate in narrow.items():
        if estimate.low is not None and widths(estimate) > 0:  # type: ignore[arg-type]
            assert widths(wide[name]) > widths(estimate), name  # type: ignore[arg-type]


def test_a_quantile_and_its_bounds_are_values_of_the_sample():
    values = np.random.default_rng(0).exponential(size=2000)
    estimator = Estimator(Sequences.of_lengths(np.full(20, 100)))
    quantile = estimator.quantile(np.sort(values), values, 0.9, "token")
    assert {quantile.value, quantile.low, quantile.high} <= set(values)
    assert quantile.value == np.sort(values)[1799]


@pytest.fixture(scope="module")
def truths() -> dict[str, float]:
    """The values that so many sequences give that they have hardly an error."""
    names = ("abs_logprob_diff", "logprob_diff_rms", "kl_k1", "kl_k3", "abs_logprob_diff_p50", "prob_abs_diff")
    large = [pair_metrics(clustered_pair(10_000, seed=10_000 + seed), names=names)[0] for seed in range(4)]
    return {name: float(np.mean([sample[name].value for sample in large])) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [64, 256])
def test_intervals_hold_the_truth_about_95_times_in_100(num_sequences: int, truths: dict[str, float]):
    names = tuple(truths)
    held = dict.fromkeys(names, 0)
    for seed in range(400):
        metrics, _ = pair_metrics(clustered_pair(num_sequences, seed), 0.95, names)
        for name in names:
            estimate = metrics[name]
            assert estimate.low is not None
            assert estimate.high is not None
            held[name] += estimate.low <= truths[name] <= estimate.high
    for name, count in held.items():
        assert 0.92 <= count / 400 <= 0.985, name


@pytest.mark.slow
def test_token_level_intervals_would_not_hold_it(truths: dict[str, float]):
    held = 0
    for seed in range(200):
        pair = clustered_pair(64, seed)
        k3 = np.expm1(pair.diff) - pair.diff
        low, high = stats.norm.interval(0.95, k3.mean(), stats.sem(k3))
        held += low <= truths["kl_k3"] <= high
    assert held < 0.6 * 200
