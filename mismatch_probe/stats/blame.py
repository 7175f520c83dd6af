"""Which side errs: each leg's error against the high-precision reference, on identical token ids.

Errors are differences of log-probs in nats; a relative error of a log-probability has no meaning near 0.
"""

import math
from collections.abc import Iterator

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Blame, Estimate
from mismatch_probe.stats.sequences import Floats, Reals, TokenPair, difference

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
