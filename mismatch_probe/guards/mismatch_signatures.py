"""What a step looks like where the sides do not score the same tokens by the same weights, or mu samples otherwise.

Each test gives None where a window does not look so.
"""

import math
import statistics

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import (
    ENDINGS,
    FAR_MAKES_IT,
    LARGEST_ROUNDING_NATS,
    LEAST_PROBE_ERROR,
    PROBE_ERROR,
    PROBE_JUMP,
    RECENT_STEPS,
    SCALE_EXPLAINS,
    SCALE_EXPLAINS_PART,
    SHIFT_RESTORES,
    Diagnosis,
    Window,
    contradicts_temperature,
    is_hidden,
    logit_slopes,
    probe_agrees,
    weights_are_equal,
)
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.rules.mean import newest_means
from mismatch_probe.guards.sums import BASE_OF_MU, BASE_OF_PI
from mismatch_probe.notation import write_percent
from mismatch_probe.stats.bases import base_name
from mismatch_probe.stats.pair_totals import LEAST_RESTORED

_UNLIKE = 0.3
_LABEL_NATS = 0.5
_SURPRISES = ("mismatch/surprise", "sync/draw_surprise")
_ALIKE = 0.25
_MOST_RESPONSES = 0.5
_ABOVE_BELOW = 0.1
_SOUND_BEFORE = 0.1
_GROWN = 3.0
_MOST_GROWN = 20.0
_SYMMETRIC_ERRORS = 5.0
_K3_OF_RMS = (0.5, 2.0)
_ENGINE_K3 = 0.015


@ENDINGS.of(EndCause.MISPAIRED)
def mispaired_responses(window: Window) -> Diagnosis | None:
    """The responses that are far apart fit the log-probs of other responses of their batch."""
    share = window.last("mismatch/exchanged_share")
    if share is None or not share >= LEAST_RESTORED:
        return None
    return Diagnosis.of(EndCause.MISPAIRED, share=write_percent(share))


@ENDINGS.of(EndCause.LABEL_OFFSET)
def label_offset(window: Window) -> Diagnosis | None:
    """The sides' log-probs are of other tokens: those of one fit the other's once they are shifted by one.

    Or pi is asked for other tokens. The two then do not go together, and pi is surprised by just what mu finds likely:
    mean(log mu) is minus pi's entropy, which an engine with other weights would have no reason to keep to.
    """
    shift_rest, error = window.last("mismatch/shift_left"), window.last("mismatch/logit_error")
    if shift_rest is not None and error is not None and shift_rest <= SHIFT_RESTORES and error > LARGEST_ROUNDING_NATS:
        return Diagnosis.of(EndCause.LABEL_OFFSET, rest=write_value(shift_rest))
    pearson, gap = window.last("mismatch/prob_pearson"), window.last("mismatch/kl_k1")
    excess = window.last("mismatch/surprise_excess")
    if pearson is None or gap is None or excess is None or not pearson < _UNLIKE or excess < _LABEL_NATS:
        return None
    if not abs(gap - excess) <= _ALIKE * excess:
        return None
    return Diagnosis.of(EndCause.LABEL_OFFSET, "other_tokens", pearson=write_value(pearson), excess=write_value(excess))


@ENDINGS.of(EndCause.TOKENS_REPLACED)
def tokens_replaced(window: Window) -> Diagnosis | None:
    """In most responses both sides agree up to a token that mu finds likely and pi does not."""
    names = ("far_responses_share", "far_below_share", "far_above_share", "far_squares_share", "error_before_far")
    values = [window.last(f"mismatch/{name}") for name in names]
    if any(value is None for value in values):
        return None
    responses, below_share, above_share, squares, error_before = (value or 0.0 for value in values)
    if (
        responses < _MOST_RESPONSES
        or above_share > _ABOVE_BELOW * below_share
        or squares < FAR_MAKES_IT
        or error_before > _SOUND_BEFORE
    ):
        return None
    return Diagnosis.of(EndCause.TOKENS_REPLACED, share=write_percent(responses), before=write_value(error_before))


@ENDINGS.of(EndCause.COMPUTATION)
def computation(window: Window) -> Diagnosis | None:
    """The probe is far apart right after a sync although digests say that the engine holds what it was sent."""
    probes = window.finite(PROBE_ERROR)
    if not weights_are_equal(window) or not probes:
        return None
    usual, k3 = min(probes), window.last("sync/probe_k3") or 0.0
    if probes[-1] <= max(LEAST_PROBE_ERROR, PROBE_JUMP * usual) and k3 <= _ENGINE_K3:
        return None
    return Diagnosis.of(EndCause.COMPUTATION, nats=write_value(probes[-1]), kl=write_value(k3))


@ENDINGS.of(EndCause.OTHER_SCORES)
def other_scores(window: Window) -> Diagnosis | None:
    """Both sides agree on the probe, whose tokens they score anew, and not on what was recorded of the responses."""
    error, k3 = window.last("mismatch/logit_error"), window.last("mismatch/kl_k3")
    probe = window.last("sync/probe_k3")
    if error is None or k3 is None or probe is None or not probe_agrees(window):
        return None
    if error <= _GROWN * LARGEST_ROUNDING_NATS:
        return None
    return Diagnosis.of(EndCause.OTHER_SCORES, probe=write_value(probe), kl=write_value(k3), nats=write_value(error))


@ENDINGS.of(EndCause.PRECISION_DRIFT)
def precision_drift(window: Window) -> Diagnosis | None:
    """The mismatch grows at weights that are known to be equal, by symmetric errors of the size of a format's rounding.

    Small errors d have a k3 of half their mean square, a mean of pi/mu of 1, and follow neither a shift nor the scale
    of logits.
    """
    levels = [level for level in window.finite("mismatch/kl_k3") if level > 0]
    half = max(1, len(levels) // 2)
    start, end = (statistics.median(part) if part else 0.0 for part in (levels[:half], levels[-half:]))
    if window.events and not any(event.metric.startswith("mismatch/") for event in window.events):
        return None
    if len(levels) < 4 or not _GROWN * start <= end <= _MOST_GROWN * start:
        return None
    if not (weights_are_equal(window) or probe_is_level(window)) or logit_slopes(window):
        return None
    error, rms, k3 = (window.last(f"mismatch/{name}") for name in ("logit_error", "logprob_diff_rms", "kl_k3"))
    if error is None or rms is None or k3 is None or error > LARGEST_ROUNDING_NATS:
        return None
    ratio, ratio_error = window.last("mismatch/is_ratio_mean"), window.last("mismatch/is_ratio_mean_error")
    is_symmetric = ratio is not None and ratio_error is not None and abs(ratio - 1) <= _SYMMETRIC_ERRORS * ratio_error
    if not is_symmetric or not _K3_OF_RMS[0] <= k3 / (rms**2 / 2) <= _K3_OF_RMS[1]:
        return None
    return Diagnosis.of(
        EndCause.PRECISION_DRIFT,
        start=write_value(start),
        end=write_value(end),
        steps=len(levels),
        nats=write_value(error),
    )


def probe_is_level(window: Window) -> bool:
    """Whether the probe after each sync stayed where it was, within rounding."""
    probes = window.finite(PROBE_ERROR)
    return bool(probes) and max(probes) <= min(
        LARGEST_ROUNDING_NATS, max(LEAST_PROBE_ERROR, PROBE_JUMP * statistics.median(probes))
    )


_JUMP = 10.0


@ENDINGS.of(EndCause.STALE_SYNC)
def stale_sync(window: Window) -> Diagnosis | None:
    """The engine repeats its log-probs bit for bit, or a resync ends a mismatch that had grown before it."""
    recent = sorted(window.history)[-RECENT_STEPS:]
    stale_steps = [step for step in recent if window.history[step].get("sync/engine_unchanged", 0.0) > 0]
    if stale_steps:
        return Diagnosis.of(EndCause.STALE_SYNC, step=stale_steps[-1])
    for event in window.events:
        if event.step in recent and any(action.kind is ActionKind.RESYNC for action in event.actions):
            k3_before = window.history.get(event.step, {}).get("mismatch/kl_k3", math.nan)
            k3_after = window.history.get(event.step + 1, {}).get("mismatch/kl_k3", math.nan)
            if k3_before > _JUMP * k3_after and k3_after <= _ENGINE_K3:
                return Diagnosis.of(
                    EndCause.STALE_SYNC,
                    "resync",
                    before=write_value(k3_before),
                    after=write_value(k3_after),
                    step=event.step,
                )
    return None


@ENDINGS.of(EndCause.PARTIAL_SYNC)
def partial_sync(window: Window) -> Diagnosis | None:
    """Some of the engine's weights are not those that were sent in a recent step: their digests differ."""
    recent = sorted(window.history)[-RECENT_STEPS:]
    counts = {
        name: max((window.history[step].get(f"sync/weights_{name}", 0.0) for step in recent), default=0.0)
        for name in ("unchanged", "other")
    }
    if counts["unchanged"]:
        evidence = (
            f"{write_value(counts['unchanged'])} of its weights hold what they held before other numbers were sent"
        )
    elif counts["other"]:
        evidence = f"{write_value(counts['other'])} of its weights hold other numbers than were sent"
    else:
        return None
    return Diagnosis.of(EndCause.PARTIAL_SYNC, seen=evidence)


@ENDINGS.of(EndCause.ENGINE_WEIGHTS)
def engine_weights(window: Window) -> Diagnosis | None:
    """The probe is far from where it was in the steps before a guard on it fired, or before the last one; where digests
    say that the weights are equal it is not they.
    """
    steps = [event.step for event in window.events if event.metric == PROBE_ERROR]
    start = min([*steps, *list(window.history)[-1:]], default=0)
    probes, probes_before = window.finite(PROBE_ERROR), window.steps_before(start).finite(PROBE_ERROR)
    if not probes_before or probes[-1] <= max(LEAST_PROBE_ERROR, PROBE_JUMP * statistics.median(probes_before)):
        return None
    if weights_are_equal(window):
        return None
    return Diagnosis.of(
        EndCause.ENGINE_WEIGHTS, now=write_value(probes[-1]), before=write_value(statistics.median(probes_before))
    )


_OTHER_TEMPERATURE = 0.1
_STEADY = 1.01
"""Ratio of two steps' fits: a temperature is one number, and other weights mostly move it by more."""
_TOLERANCE = 0.002
_ERRORS = 5.0
_SHARED_OUT = 2.0


@ENDINGS.of(EndCause.OTHER_BASE)
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
    return Diagnosis.of(
        EndCause.OTHER_BASE, whose=whose, base=base_name(base), is_what=is_what, number=base, nats=math.log(base)
    )


@ENDINGS.of(EndCause.TEMPERATURE)
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
    return Diagnosis.of(EndCause.TEMPERATURE, slope=slope)


@ENDINGS.of((EndCause.TEMPERATURE, "sampler"))
def sampling(window: Window) -> Diagnosis | None:
    """Tokens that pi would not have drawn, although the log-probs of both sides agree; where these follow a temperature
    it is that one.
    """
    departures = (
        _significant_departure(window, f"{name}_mean", f"{name}_error", expectation=0.0) for name in _SURPRISES
    )
    departure = next((nats for nats in departures if nats is not None), None)
    if departure is None or not is_hidden(window, departure):
        return None
    fits = window.finite("mismatch/temperature_fit")[-2:]
    if fits and min(abs(fit - 1) for fit in fits) > _OTHER_TEMPERATURE:
        return _different_temperatures(f"with a slope of {write_value(fits[-1])}")
    return Diagnosis.of(
        EndCause.TEMPERATURE, "sampler", nats=write_value(abs(departure)), above="above" if departure > 0 else "below"
    )


@ENDINGS.of((EndCause.TEMPERATURE, "support"))
def support(window: Window) -> Diagnosis | None:
    """Tokens to which the engine gives more than pi on average, and to none much more: it shares out what it took from
    others.
    """
    departure = _significant_departure(
        window, "mismatch/is_ratio_mean", "mismatch/is_ratio_mean_error", expectation=1.0
    )
    gap = window.last("mismatch/kl_k1")
    if departure is None or departure > 0 or (gap is not None and gap > _SHARED_OUT * -departure):
        return None
    return Diagnosis.of(
        EndCause.TEMPERATURE, "support", percent=write_value(-100 * departure), mean=write_value(1 + departure)
    )


def _significant_departure(window: Window, metric: str, error: str, *, expectation: float) -> float | None:
    """How far the mean of the newest steps is from what it is in expectation; None where that may be noise. A guard
    looks back on more steps than the window holds, so what it saw counts too.
    """
    pairs = zip(window.finite(metric), window.finite(error), strict=False)
    candidates = (
        (mean - expectation, _TOLERANCE + _ERRORS * error_of_mean)
        for _, mean, error_of_mean in newest_means([list(pair) for pair in pairs])
    )
    departures = [departure for departure, limit in candidates if abs(departure) > limit]
    of_guards = [event.value - expectation for event in window.events if event.metric == metric]
    return next(iter(departures + of_guards), None)
