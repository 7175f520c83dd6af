"""Which side errs, and one metric against another, each with an interval.

Errors are differences of log-probs in nats; a relative error of a log-probability has no meaning near 0.
"""

import math
from collections.abc import Iterator

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.results import Blame, Estimate
from mismatch_probe.stats.sequences import Floats, Reals, Sequences, TokenPair, difference


def contrast(first: Estimate, second: Estimate) -> Estimate | None:
    """Ratio first / second of two positive estimates from independent samples; None where either is not positive.

    The interval recovers each log estimate's variance from its own bounds (MOVER): it stays as lopsided as they are
    [Zou and Donner 2008, Statistics in Medicine 27:1693; Donner and Zou 2012, Stat. Methods Med. Res. 21:347]. Samples
    that share prompts are positively related, which makes it cautious.

    Raises:
        ValueError: the intervals have different levels.
    """
    if first.level != second.level:
        raise ValueError(f"intervals of levels {first.level} and {second.level} cannot be set against each other")
    if first.value <= 0 or second.value <= 0:
        return None
    low, high = None, None
    bounds = (first.low, first.high, second.low, second.high)
    if all(bound is not None and bound > 0 for bound in bounds):
        first_low, first_high, second_low, second_high = (math.log(bound) for bound in bounds if bound is not None)
        log_first, log_second = math.log(first.value), math.log(second.value)
        center = log_first - log_second
        low = math.exp(center - math.hypot(log_first - first_low, second_high - log_second))
        high = math.exp(center + math.hypot(first_high - log_first, log_second - second_low))
    return Estimate(
        value=first.value / second.value,
        low=low,
        high=high,
        level=first.level,
        num_sequences=first.num_sequences + second.num_sequences,
        num_tokens=first.num_tokens + second.num_tokens,
        by=first.by,
        num_prompts=fewer_prompts(first, second),
    )


def paired_contrast(sequences: Sequences, first: Floats, second: Floats, level: float) -> Estimate | None:
    """Ratio of the means of two positive values of the same tokens [T]; None where either mean is not positive.

    Each prompt is left out of both at once (jackknife), so what makes both large together widens nothing.
    """
    if not (first.sum() > 0 and second.sum() > 0):
        return None
    estimator = Estimator(sequences, level)
    totals = [estimator.totals(values, "token") for values in (first, second)]
    return estimator.smooth(ratio, totals, "token", Scale.RATIO)


def fewer_prompts(first: Estimate, second: Estimate) -> int | None:
    """Prompts of the sample that has fewer; None where one does not say."""
    if first.num_prompts is None or second.num_prompts is None:
        return None
    return min(first.num_prompts, second.num_prompts)


NO_REFERENCE = "there is no high-precision reference leg"


def blame(pair: TokenPair, level: float = 0.95) -> Blame:
    """Root mean square errors of both sides, their correlation, and what each is made of.

    d = e_pi - e_mu, so rms(d)^2 = rms(e_pi)^2 + rms(e_mu)^2 - 2 mean(e_pi e_mu): uncorrelated errors add in squares
    [Taylor 1997, An Introduction to Error Analysis, section 3.6], and `rms_if_independent` is what they would give.
    """
    estimator = Estimator(pair.sequences, level)
    rms_difference = estimator.root_mean_square(pair.diff, "token")
    if rms_difference is None:
        raise ValueError("log-probs differ by more than a float64 can square")
    components = dict(_rms_of(_components(pair), estimator))
    floors = _floors(pair, level)
    if pair.log_ref is None:
        reasons = dict.fromkeys(("rms_error_pi", "rms_error_mu", "error_correlation", "share_pi"), NO_REFERENCE)
        return Blame(None, None, None, rms_difference, None, None, components, floors, reasons)
    error_pi, error_mu = difference(pair.log_pi, pair.log_ref), difference(pair.log_mu, pair.log_ref)
    rms_pi, rms_mu = (estimator.root_mean_square(error, "token") for error in (error_pi, error_mu))
    correlation = estimator.correlation(error_pi, error_mu, "token")
    squares = [estimator.totals(error**2, "token") for error in (error_pi, error_mu)]
    share = estimator.smooth(_share_of_first, squares, "token", Scale.SHARE)
    unavailable = {}
    if correlation is None:
        unavailable["error_correlation"] = "one side's error does not vary"
    if share is None:
        unavailable["share_pi"] = "neither side errs"
    return Blame(
        rms_error_pi=rms_pi,
        rms_error_mu=rms_mu,
        error_correlation=correlation,
        rms_difference=rms_difference,
        rms_if_independent=math.hypot(rms_pi.value, rms_mu.value) if rms_pi and rms_mu else None,
        share_pi=share,
        components=components,
        floors=floors,
        unavailable=unavailable,
    )


def _share_of_first(first: Floats, second: Floats) -> Floats:
    return first / (first + second)


def _components(pair: TokenPair) -> Iterator[tuple[str, Reals, Reals]]:
    """Name and the two legs whose difference it is, for each contrast whose legs were recorded."""
    if pair.log_mu_prefill is not None:
        yield "mu_decode_vs_prefill", pair.log_mu, pair.log_mu_prefill
        yield "pi_vs_mu_prefill", pair.log_pi, pair.log_mu_prefill
    if pair.log_ref is None:
        return
    if pair.log_mu_prefill is not None:
        yield "mu_prefill", pair.log_mu_prefill, pair.log_ref
    rounded_legs = (("pi", pair.log_pi, pair.log_ref_rounded_pi), ("mu", pair.log_mu, pair.log_ref_rounded_mu))
    for side, leg, rounded in rounded_legs:
        if rounded is not None:
            yield f"{side}_weight_cast", rounded, pair.log_ref
            yield f"{side}_arithmetic", leg, rounded


def _floors(pair: TokenPair, level: float) -> dict[str, Estimate]:
    floors = {
        name: Estimator(repeat.sequences, level).root_mean_square(repeat.diff, "token")
        for name, repeat in pair.repeats.items()
    }
    return {name: rms for name, rms in floors.items() if rms is not None}


def _rms_of(contrasts: Iterator[tuple[str, Reals, Reals]], estimator: Estimator) -> Iterator[tuple[str, Estimate]]:
    for name, first, second in contrasts:
        rms = estimator.root_mean_square(difference(first, second), "token")
        if rms is not None:
            yield name, rms
