"""From the last steps' metrics and what fired to the most likely cause, in one sentence, and what to do about it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Final

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards import learning_signatures, mismatch_signatures
from mismatch_probe.guards.actions import LOG, WARN
from mismatch_probe.guards.diagnosis import ENDINGS, Diagnosis, GuardEvent, Window, engine_follows, ruled_out
from mismatch_probe.guards.rules.base import Values, metric_words, write_value
from mismatch_probe.notation import write_many

SIGNATURES: Final = (learning_signatures, mismatch_signatures)
"""Modules whose tests of a window are registered when they are imported; more of them are below."""

_JUMP = 10.0
_LARGE_SHIFT_NATS = 0.01
_SHIFT = "update/policy_shift_k3"
_LARGE_MEAN_SHIFT_NATS = 0.005
_LARGE_FIRST_SHIFT_NATS = 0.002
_SEVERAL_STEPS = 4
_DYING_SHARE = 0.5
_DYING_FALL = 16.0
_LAST_EVENTS = 3
_LEAST_LEAP = 3.0


@ENDINGS.of(EndCause.MISSING_LOGPROBS)
def missing_logprobs(window: Window) -> Diagnosis | None:
    """Log-probs of the last step that are missing, an exact 0, or a number that no log-prob can be."""
    names = ("missing_mu_tokens", "zero_tokens", "above_zero_tokens")
    num_missing, num_zeros, num_above = (round(window.last(f"mismatch/{name}") or 0.0) for name in names)
    if (
        not num_missing + num_zeros + num_above
        or _is_measured(window.last("mismatch/kl_k3"))
        or _first_bad_step(window) is not None
    ):
        return None
    if num_above:
        return Diagnosis.of(EndCause.MISSING_LOGPROBS, "above_zero", tokens=write_many(num_above, "token"))
    if num_zeros >= (window.last("mismatch/nonfinite_tokens") or 0) / 2 and num_zeros:
        return Diagnosis.of(
            EndCause.MISSING_LOGPROBS,
            "zeros",
            side="The engine" if num_missing else "The trainer",
            tokens=write_many(num_zeros, "token"),
        )
    if not num_missing:
        return None
    return Diagnosis.of(EndCause.MISSING_LOGPROBS, tokens=write_many(num_missing, "token"))


@ENDINGS.of(EndCause.FP16_DEAD)
def fp16_dead(window: Window) -> Diagnosis | None:
    """Loss 0, gradient norm 0 and reward NaN in one step; or gradients that no scale tried keeps finite for long.

    Where pi's log-probs are finite, no activation left FP16's range: then rewards alone are NaN. So they are where
    single rewards were seen to be no numbers and no log-probs are there to say more.
    """
    reward, in_a_row = window.last("reward/mean"), window.last("optim/overflows_in_a_row") or 0.0
    scales, overflows = window.finite("optim/loss_scale"), window.finite("optim/overflow")
    learns_nothing = window.last("optim/loss") == 0 and window.last("optim/grad_norm") == 0
    mismatch = window.last("mismatch/kl_k3")
    is_unmeasured = mismatch is None and not window.last("reward/nonfinite")
    is_dead = learns_nothing and (is_unmeasured or (mismatch is not None and not math.isfinite(mismatch)))
    if is_dead and reward is not None and math.isnan(reward):
        evidence = "loss 0, gradient norm 0 and reward NaN, the signature of a run whose activations left FP16's range"
    elif in_a_row >= 2 and not window.last("reward/nonfinite") and len(scales) >= 2 and scales[-1] < max(scales):
        evidence = (
            f"the last {write_value(in_a_row)} steps had no finite gradient although the loss scale fell from "
            f"{write_value(max(scales))} to {write_value(scales[-1])}"
        )
    elif sum(overflows) >= _DYING_SHARE * len(window.history) and scales and max(scales) >= _DYING_FALL * scales[-1]:
        evidence = (
            f"{write_value(sum(overflows))} of the last {len(window.history)} updates were lost to overflow, and the "
            f"loss scale fell from {write_value(max(scales))} to {write_value(scales[-1])}"
        )
    else:
        return None
    return Diagnosis.of(EndCause.FP16_DEAD, seen=evidence)


@ENDINGS.of(EndCause.NONFINITE_GRADIENT)
def nonfinite_gradient(window: Window) -> Diagnosis | None:
    loss, in_a_row = window.last("optim/loss"), window.last("optim/overflows_in_a_row") or 0.0
    if loss is not None and not math.isfinite(loss):
        evidence = f"the loss is {write_value(loss)}"
    elif window.last("optim/nonfinite_gradients"):
        evidence = f"the gradient norm is {write_value(window.last('optim/grad_norm') or math.nan)}"
    elif in_a_row >= 2:
        evidence = f"the last {write_value(in_a_row)} gradients are not finite"
    elif (bad_step := _first_bad_step(window)) is not None:
        evidence = f"the gradient of step {bad_step} was not finite, and since then log-probs are not either"
    elif (num_unusable := _num_unusable_of_pi(window)) > 0:
        tokens = write_many(round(num_unusable), "token")
        evidence = f"the training path's log-probs or entropies of {tokens} are missing or not finite"
    else:
        return None
    return Diagnosis.of(EndCause.NONFINITE_GRADIENT, seen=evidence)


def _first_bad_step(window: Window) -> int | None:
    """The step whose gradient was not finite, where all steps after it lack log-probs: the update left weights that are
    not numbers. None where no step is so.
    """
    newest_first = sorted(window.history, reverse=True)
    bad_steps = list(takewhile(lambda step: _lacks_logprobs(window.history[step]), newest_first))
    candidates = newest_first[len(bad_steps) :][:1] if bad_steps else []
    return next((step for step in candidates if window.history[step].get("optim/nonfinite_gradients")), None)


def _lacks_logprobs(values: Values) -> bool:
    """Whether tokens lack a log-prob, and so many that the others are not measured."""
    return bool(values.get("mismatch/nonfinite_tokens")) and not _is_measured(values.get("mismatch/kl_k3"))


def _is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _num_unusable_of_pi(window: Window) -> float:
    """Tokens of the last step that pi has no number for; 0 where the others are measured."""
    if _is_measured(window.last("mismatch/kl_k3")):
        return 0.0
    return (window.last("mismatch/nonfinite_tokens") or 0.0) - (window.last("mismatch/missing_mu_tokens") or 0.0)


@ENDINGS.of(EndCause.NO_END)
def no_end(window: Window) -> Diagnosis | None:
    share = window.last("response/unended_share")
    if not share:
        return None
    return Diagnosis.of(EndCause.NO_END, percent=write_value(100 * share))


@ENDINGS.of(EndCause.LEARNING_RATE)
def learning_rate(window: Window) -> Diagnosis | None:
    """A rate that a guard saw jump to where it may do harm, or an update that moved the policy far more than those
    before it, and what followed. A schedule that begins anew jumps, too, to a rate that the run had before, and no
    guard fires.
    """
    rates = [rate for rate in window.finite("optim/learning_rate") if rate > 0]
    jump = max(pairwise(rates), key=lambda pair: pair[1] / pair[0], default=None)
    events = [event for event in window.events if event.metric == "optim/learning_rate"]
    if jump is not None and any(set(event.actions) - {WARN, LOG} for event in events):
        evidence = f"it rose from {write_value(jump[0])} to {write_value(jump[1])} in one step"
    else:
        shift = _large_shift(window)
        if shift is None:
            return None
        evidence = shift
    return _too_high_rate(window, evidence)


@ENDINGS.of((EndCause.LEARNING_RATE, "several"))
def several_large_updates(window: Window) -> Diagnosis | None:
    """Updates that lost the reward, far from the first steps on; ones that grow step by step while the reward falls
    look alike where the gradient has the wrong sign. A reward of few responses halves by chance, so what says that
    both sides compute otherwise comes first.
    """
    shifts = [shift for shift in window.finite(_SHIFT) if shift > 0]
    if not shifts or not _has_fallen(window.finite("reward/mean")) or not engine_follows(window, max(shifts)):
        return None
    mean, first = statistics.fmean(shifts), statistics.median(shifts[:_SEVERAL_STEPS])
    if mean <= _LARGE_MEAN_SHIFT_NATS or first <= _LARGE_FIRST_SHIFT_NATS:
        return None
    return _too_high_rate(window, f"updates moved the policy by {write_value(mean)} nats on average")


def _too_high_rate(window: Window, evidence: str) -> Diagnosis:
    falls = [name for name in ("reward/mean", "policy/entropy") if _has_fallen(window.finite(name))]
    consequence = f", and {' and '.join(falls)} fell to less than half" if falls else ""
    return Diagnosis.of(EndCause.LEARNING_RATE, seen=f"{evidence}{consequence}")


def _large_shift(window: Window) -> str | None:
    """One update that moved the policy far, by the usual one or by a guard on it, and the engine with it."""
    shifts = window.finite(_SHIFT)
    sizes = sorted(shift for shift in shifts if shift > 0)
    usual = statistics.median(sizes or [0.0])
    is_beyond_usual = sizes and sizes[-1] > max(_LARGE_SHIFT_NATS, _JUMP * usual if len(shifts) > 2 else 0.0)
    if not is_beyond_usual and not (sizes and any(event.metric == _SHIFT for event in window.events)):
        return None
    if not engine_follows(window, sizes[-1]):
        return None
    return f"one update moved the policy by {write_value(sizes[-1])} nats, the usual one by {write_value(usual)}"


def without_cause(window: Window) -> Diagnosis:
    """What guards saw and, where that is a mismatch, which causes of one the last step speaks against."""
    evidence = "; ".join(event.sentence for event in window.events[-_LAST_EVENTS:]) or "nothing fired"
    is_mismatch = any(event.metric.startswith(("mismatch/", "sync/", _SHIFT)) for event in window.events)
    causes = list(ruled_out(window)) if is_mismatch else []
    rest = f" Ruled out: {'; '.join(causes)}." if causes else ""
    since = _since_when(window, "mismatch/kl_k3") if is_mismatch else ""
    return Diagnosis.of(EndCause.UNEXPLAINED, seen=evidence, since=since, ruled_out=rest)


def _since_when(window: Window, metric: str) -> str:
    """Between which steps of the window a metric leapt most, or that it was so large from the first of them on."""
    points = [(step, value) for step, of in window.history.items() if 0 < (value := of.get(metric, 0.0)) < math.inf]
    if len(points) < 2:
        return ""
    low, high = max(pairwise(points), key=lambda both: both[1][1] / both[0][1])
    words, (newest, last) = metric_words(metric), points[-1]
    if high[1] < _LEAST_LEAP * low[1]:
        first, value = points[0]
        return f" {words} has no leap: {write_value(value)} at step {first}, {write_value(last)} at step {newest}."
    since = "" if newest == high[0] else f", and {write_value(last)} at step {newest}"
    return (
        f" {words} went from {write_value(low[1])} at step {low[0]} to {write_value(high[1])} at step "
        f"{high[0]}{since}: look at what changed between these two steps."
    )


def _has_fallen(values: list[float]) -> bool:
    return len(values) >= 2 and values[-1] < max(values) / 2


def diagnose(history: Mapping[int, Values], events: Sequence[GuardEvent]) -> Diagnosis:
    """The first cause whose signature the window shows.

    history: metrics of the last steps by step number, the newest included; a dozen is enough, since the signatures are
    jumps and levels. events: the firings of the run; those of other steps are left out.
    """
    window = Window(dict(sorted(history.items())), [event for event in events if event.step in history])
    return next((diagnosis for signature in ENDINGS if (diagnosis := signature(window))), without_cause(window))
