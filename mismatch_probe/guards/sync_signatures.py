"""What a step looks like when the engine holds other weights, or does not sample from pi."""

import math
import statistics

from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.base_totals import BASE_OF_MU, BASE_OF_PI
from mismatch_probe.guards.diagnosis import (
    LEAST_PROBE_ERROR,
    PROBE_ERROR,
    PROBE_JUMP,
    RECENT_STEPS,
    SCALE_EXPLAINS,
    SCALE_EXPLAINS_PART,
    Diagnosis,
    EndCause,
    Window,
    contradicts_temperature,
    is_hidden,
    logit_slopes,
    weights_are_equal,
)
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.rules.mean import newest_means
from mismatch_probe.stats.bases import base_name

_JUMP = 10.0
_COMPARE_WEIGHTS = (
    "Compare the weights of both sides layer by layer: tied embeddings, merged adapters, renamed parameters."
)


def stale_sync(window: Window) -> Diagnosis | None:
    """The engine repeats its log-probs bit for bit, or a resync brings back a mismatch that had grown before it."""
    recent = sorted(window.history)[-RECENT_STEPS:]
    unchanged = [step for step in recent if window.history[step].get("sync/engine_unchanged", 0.0) > 0]
    advice = ("Check that each update is followed by a weight sync, and that the engine's caches are reset after it.",)
    if unchanged:
        return Diagnosis(
            EndCause.STALE_SYNC,
            f"The engine samples from old weights: at step {unchanged[-1]} its log-probs were bit for bit those from "
            "before the sync, although the weights sent differ.",
            advice,
        )
    for event in window.events:
        if event.step in recent and any(action.kind is ActionKind.RESYNC for action in event.actions):
            before = window.history.get(event.step, {}).get("mismatch/kl_k3", math.nan)
            after = window.history.get(event.step + 1, {}).get("mismatch/kl_k3", math.nan)
            if before > _JUMP * after:
                return Diagnosis(
                    EndCause.STALE_SYNC,
                    f"The engine had lost the weights: the mismatch fell from {write_value(before)} to "
                    f"{write_value(after)} nats when they were sent again after step {event.step}.",
                    advice,
                )
    return None


def partial_sync(window: Window) -> Diagnosis | None:
    """Some of the engine's weights, told by their digests, are not those that were sent in a recent step."""
    recent = sorted(window.history)[-RECENT_STEPS:]
    counts = {
        name: max((window.history[step].get(f"sync/weights_{name}", 0.0) for step in recent), default=0.0)
        for name in ("unchanged", "other")
    }
    if counts["unchanged"]:
        seen = f"{write_value(counts['unchanged'])} of its weights hold what they held before other numbers were sent"
    elif counts["other"]:
        seen = f"{write_value(counts['other'])} of its weights hold other numbers than were sent"
    else:
        return None
    return Diagnosis(
        EndCause.PARTIAL_SYNC,
        f"The engine took only a part of the weights: right after a sync {seen}.",
        (
            "The log of the run (logs/train.log) names them: see what is left out or changed on the way.",
            _COMPARE_WEIGHTS,
        ),
    )


def engine_weights(window: Window) -> Diagnosis | None:
    """The probe is far from where it was in the steps before a guard on it fired, or before the last one; where digests
    say that the weights are equal it is not they.
    """
    fired = [event.step for event in window.events if event.metric == PROBE_ERROR]
    begun = min([*fired, *list(window.history)[-1:]], default=0)
    probes, earlier = window.finite(PROBE_ERROR), window.before(begun).finite(PROBE_ERROR)
    if not earlier or probes[-1] <= max(LEAST_PROBE_ERROR, PROBE_JUMP * statistics.median(earlier)):
        return None
    if weights_are_equal(window):
        return None
    return Diagnosis(
        EndCause.ENGINE_WEIGHTS,
        "The engine does not hold the weights it was sent, or computes otherwise: right after a sync its logits of the "
        f"probe tokens are {write_value(probes[-1])} nats from pi's, {write_value(statistics.median(earlier))} before.",
        (_COMPARE_WEIGHTS, "Where they are equal, compare positions (RoPE), attention masks and number formats."),
    )


_OTHER_TEMPERATURE = 0.1
_STEADY = 1.01
"""Ratio of two steps' fits: a temperature is one number, and other weights mostly move it by more."""
_TOLERANCE = 0.002
_ERRORS = 5.0
_SHARED_OUT = 2.0


def other_base(window: Window) -> Diagnosis | None:
    """One side is proportional to the other by the logarithm of a base, or both are to pi's entropy, in the newest of
    the last steps that tells: one of few tokens does not.
    """
    recent = [window.history[step] for step in sorted(window.history, reverse=True)[:RECENT_STEPS]]
    sides = [[step.get(name, 0.0) for name in (BASE_OF_PI, BASE_OF_MU)] for step in recent]
    of_pi, of_mu = next((bases for bases in sides if max(bases) > 1), (0.0, 0.0))
    base = round(of_pi or of_mu)
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
    """d follows the logit scale, in two of the last steps alike; pi's entropies say so, or the log-probs alone. In a
    run's first step both must.
    """
    fits, slopes = window.finite("mismatch/temperature_fit")[-2:], logit_slopes(window)
    by_fit = (
        len(fits) == min(2, len(window.history)) > 0
        and min(abs(fit - 1) for fit in fits) > _OTHER_TEMPERATURE
        and max(fits) <= 1.1 * min(fits)
    )
    is_steady = by_fit and len(fits) == 2 and max(fits) <= _STEADY * min(fits)
    if by_fit and not contradicts_temperature(window, SCALE_EXPLAINS_PART if is_steady else SCALE_EXPLAINS):
        slope = f"with a slope of {write_value(fits[-1])}"
    elif slopes:
        slope = f"with a slope of about {write_value((2 - slopes[0]) / (2 + slopes[0]))}"
    else:
        return None
    return _different_temperatures(slope)


def _different_temperatures(slope: str) -> Diagnosis:
    return Diagnosis(
        EndCause.TEMPERATURE,
        f"The two sides use different temperatures: mu's log-probs follow pi's {slope} where 1 is due.",
        ("Divide the training path's logits by the sampling temperature, and take processed log-probs of the engine.",),
    )


def sampling(window: Window) -> Diagnosis | None:
    """Tokens that pi would not have drawn, although the log-probs of both sides agree; where these follow a temperature
    it is that one.
    """
    beyond = _beyond(window, "mismatch/surprise_mean", "mismatch/surprise_error", expected=0.0)
    if beyond is None or not is_hidden(window, beyond):
        return None
    fits = window.finite("mismatch/temperature_fit")[-2:]
    if fits and min(abs(fit - 1) for fit in fits) > _OTHER_TEMPERATURE:
        return _different_temperatures(f"with a slope of {write_value(fits[-1])}")
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
