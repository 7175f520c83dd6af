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
from mismatch_probe.guards.rules.base import Values, write_value
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


@ENDINGS.of(EndCause.MISSING_LOGPROBS)
def missing_logprobs(window: Window) -> Diagnosis | None:
    """Log-probs of the last step that are missing, an exact 0, or a number that no log-prob can be."""
    names = ("missing_mu_tokens", "zero_tokens", "above_zero_tokens")
    missing, zeros, above = (round(window.last(f"mismatch/{name}") or 0.0) for name in names)
    if not missing + zeros + above or _is_measured(window.last("mismatch/kl_k3")) or _spoiling_step(window) is not None:
        return None
    if above:
        return Diagnosis.of(EndCause.MISSING_LOGPROBS, "above_zero", tokens=write_many(above, "token"))
    if zeros >= (window.last("mismatch/nonfinite_tokens") or 0) / 2 and zeros:
        return Diagnosis.of(
            EndCause.MISSING_LOGPROBS,
            "zeros",
            side="The engine" if missing else "The trainer",
            tokens=write_many(zeros, "token"),
        )
    if not missing:
        return None
    return Diagnosis.of(EndCause.MISSING_LOGPROBS, tokens=write_many(missing, "token"))


@ENDINGS.of(EndCause.FP16_DEAD)
def fp16_dead(window: Window) -> Diagnosis | None:
    """Loss 0, gradient norm 0 and reward NaN in one step; or gradients that no scale tried keeps finite for long.

    Where the trainer's log-probs are finite, no activation left FP16's range: then rewards alone are NaN. So they are
    where single rewards were seen to be no numbers and no log-probs are there to say more.
    """
    reward, in_a_row = window.last("reward/mean"), window.last("optim/overflows_in_a_row") or 0.0
    scales, lost = window.finite("optim/loss_scale"), window.finite("optim/overflow")
    learns_nothing = window.last("optim/loss") == 0 and window.last("optim/grad_norm") == 0
    mismatch = window.last("mismatch/kl_k3")
    unseen = mismatch is None and not window.last("reward/nonfinite")
    dead = learns_nothing and (unseen or (mismatch is not None and not math.isfinite(mismatch)))
    if dead and reward is not None and math.isnan(reward):
        seen = "loss 0, gradient norm 0 and reward NaN, the signature of a run whose activations left FP16's range"
    elif in_a_row >= 2 and not window.last("reward/nonfinite") and len(scales) >= 2 and scales[-1] < max(scales):
        seen = (
            f"the last {write_value(in_a_row)} steps had no finite gradient although the loss scale fell from "
            f"{write_value(max(scales))} to {write_value(scales[-1])}"
        )
    elif sum(lost) >= _DYING_SHARE * len(window.history) and scales and max(scales) >= _DYING_FALL * scales[-1]:
        seen = (
            f"{write_value(sum(lost))} of the last {len(window.history)} updates were lost to overflow, and the loss "
            f"scale fell from {write_value(max(scales))} to {write_value(scales[-1])}"
        )
    else:
        return None
    return Diagnosis.of(EndCause.FP16_DEAD, seen=seen)


@ENDINGS.of(EndCause.NONFINITE_GRADIENT)
def nonfinite_gradient(window: Window) -> Diagnosis | None:
    loss, in_a_row = window.last("optim/loss"), window.last("optim/overflows_in_a_row") or 0.0
    if loss is not None and not math.isfinite(loss):
        seen = f"the loss is {write_value(loss)}"
    elif window.last("optim/nonfinite_gradients"):
        seen = f"the gradient norm is {write_value(window.last('optim/grad_norm') or math.nan)}"
    elif in_a_row >= 2:
        seen = f"the last {write_value(in_a_row)} gradients are not finite"
    elif (spoiling := _spoiling_step(window)) is not None:
        seen = f"the gradient of step {spoiling} was not finite, and since then log-probs are not either"
    elif (unusable := _unusable_of_pi(window)) > 0:
        seen = (
            f"the trainer's log-probs or entropies of {write_many(round(unusable), 'token')} are missing or not finite"
        )
    else:
        return None
    return Diagnosis.of(EndCause.NONFINITE_GRADIENT, seen=seen)


def _spoiling_step(window: Window) -> int | None:
    """The step whose gradient was not finite, where all steps after it lack log-probs: the update left weights that are
    not numbers. None where no step is so.
    """
    newest_first = sorted(window.history, reverse=True)
    spoiled = list(takewhile(lambda step: _is_spoiled(window.history[step]), newest_first))
    before = newest_first[len(spoiled) :][:1] if spoiled else []
    return next((step for step in before if window.history[step].get("optim/nonfinite_gradients")), None)


def _is_spoiled(values: Values) -> bool:
    """Whether tokens lack a log-prob, and so many that the others are not measured."""
    return bool(values.get("mismatch/nonfinite_tokens")) and not _is_measured(values.get("mismatch/kl_k3"))


def _is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _unusable_of_pi(window: Window) -> float:
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
    fired = [event for event in window.events if event.metric == "optim/learning_rate"]
    if jump is not None and any(set(event.actions) - {WARN, LOG} for event in fired):
        seen = f"it rose from {write_value(jump[0])} to {write_value(jump[1])} in one step"
    else:
        large = _large_shifts(window)
        if large is None:
            return None
        seen = large
    collapsed = [name for name in ("reward/mean", "policy/entropy") if _fell(window.finite(name))]
    then = f", and {' and '.join(collapsed)} fell to less than half" if collapsed else ""
    return Diagnosis.of(EndCause.LEARNING_RATE, seen=f"{seen}{then}")


def _large_shifts(window: Window) -> str | None:
    """One update that moved the policy far, by the usual one or by a guard on it, and the engine with it; or several
    that lost the reward, far from the first steps on. Updates that grow step by step while the reward falls look alike
    where the gradient has the wrong sign.
    """
    shifts = window.finite(_SHIFT)
    moved = sorted(shift for shift in shifts if shift > 0)
    usual = statistics.median(moved or [0.0])
    beyond_usual = moved and moved[-1] > max(_LARGE_SHIFT_NATS, _JUMP * usual if len(shifts) > 2 else 0.0)
    if beyond_usual or (moved and any(event.metric == _SHIFT for event in window.events)):
        if not engine_follows(window, moved[-1]):
            return None
        return f"one update moved the policy by {write_value(moved[-1])} nats, the usual one by {write_value(usual)}"
    if not moved or not _fell(window.finite("reward/mean")):
        return None
    mean = statistics.fmean(moved)
    first = statistics.median([shift for shift in shifts if shift > 0][:_SEVERAL_STEPS])
    far_from_the_start = mean > _LARGE_MEAN_SHIFT_NATS and first > _LARGE_FIRST_SHIFT_NATS
    return f"updates moved the policy by {write_value(mean)} nats on average" if far_from_the_start else None


def unexplained(window: Window) -> Diagnosis:
    """What guards saw and, where that is a mismatch, which causes of one the last step speaks against."""
    seen = "; ".join(event.sentence for event in window.events[-_LAST_EVENTS:]) or "nothing fired"
    is_mismatch = any(event.metric.startswith(("mismatch/", "sync/", _SHIFT)) for event in window.events)
    causes = list(ruled_out(window)) if is_mismatch else []
    out = f" Ruled out: {'; '.join(causes)}." if causes else ""
    return Diagnosis.of(EndCause.UNEXPLAINED, seen=seen, ruled_out=out)


def _fell(values: list[float]) -> bool:
    return len(values) >= 2 and values[-1] < max(values) / 2


def diagnose(history: Mapping[int, Values], events: Sequence[GuardEvent]) -> Diagnosis:
    """The first cause whose signature the window shows.

    history: metrics of the last steps by step number, the newest included; a dozen is enough, since the signatures are
    jumps and levels. events: the firings of the run; those of other steps are left out.
    """
    window = Window(dict(sorted(history.items())), [event for event in events if event.step in history])
    return next((seen for signature in ENDINGS if (seen := signature(window))), unexplained(window))
