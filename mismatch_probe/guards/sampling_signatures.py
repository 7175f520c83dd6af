"""What it looks like when the engine does not sample from pi; None where a window does not show it."""

import math

from mismatch_probe.guards.base_totals import BASE_OF_MU, BASE_OF_PI
from mismatch_probe.guards.diagnosis import Diagnosis, EndCause, Window
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.rules.mean import newest_means
from mismatch_probe.guards.window_evidence import (
    SCALE_EXPLAINS,
    SCALE_EXPLAINS_PART,
    contradicts_temperature,
    is_hidden,
    logit_slopes,
)
from mismatch_probe.stats.bases import base_name

_OTHER_TEMPERATURE = 0.1
_STEADY = 1.01
"""Ratio of two steps' fits: a temperature is one number, and other weights mostly move it by more."""
_TOLERANCE = 0.002
_ERRORS = 5.0
_SHARED_OUT = 2.0


def other_base(window: Window) -> Diagnosis | None:
    """One side is proportional to the other by the logarithm of a base, or both are to pi's entropy."""
    of_pi, of_mu = (window.last(name) or 0.0 for name in (BASE_OF_PI, BASE_OF_MU))
    base = round(of_pi or of_mu if max(of_pi, of_mu) > 1 else 0)
    if not base:
        return None
    whose, is_what = (
        ("Both sides'", "-log pi is that multiple of pi's entropy")
        if of_pi and of_mu
        else ("pi's" if of_pi else "mu's", "one side is that multiple of the other")
    )
    return Diagnosis(
        EndCause.OTHER_BASE,
        f"{whose} log-probs are logarithms to {base_name(base)}, not natural ones: {is_what}, at sure and at unsure "
        "tokens alike.",
        (f"Multiply them by ln {base} = {math.log(base):.4f}, or write natural log-probs (log, not log{base}).",),
    )


def temperature(window: Window) -> Diagnosis | None:
    """d follows the logit scale, in two of the last steps alike; pi's entropies say so, or the log-probs alone."""
    fits, slopes = window.finite("mismatch/temperature_fit")[-2:], logit_slopes(window)
    by_fit = len(fits) == 2 and min(abs(fit - 1) for fit in fits) > _OTHER_TEMPERATURE and max(fits) <= 1.1 * min(fits)
    is_steady = by_fit and max(fits) <= _STEADY * min(fits)
    if by_fit and not contradicts_temperature(window, SCALE_EXPLAINS_PART if is_steady else SCALE_EXPLAINS):
        slope = f"with a slope of {write_value(fits[-1])}"
    elif slopes:
        slope = f"with a slope of about {write_value((2 - slopes[0]) / (2 + slopes[0]))}"
    else:
        return None
    return Diagnosis(
        EndCause.TEMPERATURE,
        f"The two sides use different temperatures: mu's log-probs follow pi's {slope} where 1 is due.",
        ("Divide the training path's logits by the sampling temperature, and take processed log-probs of the engine.",),
    )


def sampling(window: Window) -> Diagnosis | None:
    """Tokens that pi would not have drawn, although the log-probs of both sides agree."""
    beyond = _beyond(window, "mismatch/surprise_mean", "mismatch/surprise_error", expected=0.0)
    if beyond is None or not is_hidden(window, beyond):
        return None
    side = "above" if beyond > 0 else "below"
    return Diagnosis(
        EndCause.TEMPERATURE,
        "The engine does not sample from the distribution whose log-probs it reports: pi's log-probs of the responses "
        f"are {write_value(abs(beyond))} nats a token {side} what its entropy says.",
        ("Look for a temperature, top-p, top-k or penalty that shapes the samples and not the log-probs.",),
    )


def support(window: Window) -> Diagnosis | None:
    """Tokens to which the engine gives more than pi on average, and to none much more: it shares out what it took from
    others.
    """
    beyond = _beyond(window, "mismatch/is_ratio_mean", "mismatch/is_ratio_mean_error", expected=1.0)
    behind = window.last("mismatch/kl_k1")
    if beyond is None or beyond > 0 or (behind is not None and behind > _SHARED_OUT * -beyond):
        return None
    return Diagnosis(
        EndCause.TEMPERATURE,
        f"The engine gives nothing to {write_value(-100 * beyond)} % of what pi would sample: the mean of pi/mu over "
        f"its tokens is {write_value(1 + beyond)} where 1 is due.",
        ("Look for top-p, top-k, min-p or forbidden tokens on the engine's side, or give pi the same.",),
    )


def _beyond(window: Window, metric: str, error: str, *, expected: float) -> float | None:
    """How far the mean of the newest steps is from what it is in expectation; None where that may be noise. A guard
    looks back on more steps than the window holds, so what it saw counts too.
    """
    pairs = zip(window.finite(metric), window.finite(error), strict=False)
    departures = (
        (mean - expected, _TOLERANCE + _ERRORS * error_of_mean)
        for _, mean, error_of_mean in newest_means([list(pair) for pair in pairs])
    )
    beyond = [departure for departure, allowed in departures if abs(departure) > allowed]
    told = [event.value - expected for event in window.events if event.metric == metric]
    return next(iter(beyond + told), None)
