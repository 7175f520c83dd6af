"""What a course of many steps looks like that leads nowhere; None where a window and its firings do not show it."""

import math
import statistics

from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnosis import Diagnosis, EndCause, Window
from mismatch_probe.guards.rules.base import write_value

_GRADIENT_JUMP = 20.0
_STEPS_FOR_A_HIGHEST = 4
_RECENT_STEPS = 4


def gradient_scale(window: Window) -> Diagnosis | None:
    """The gradient's norm jumped beyond all those before it, although nothing else did."""
    norms = [norm for norm in window.finite("optim/grad_norm") if norm > 0]
    fired = _last_event(window, "optim/grad_norm")
    if fired is not None and fired.rule == "beyond" and math.isfinite(fired.value):
        before, now = fired.threshold / _GRADIENT_JUMP, fired.value
    elif len(norms) > _STEPS_FOR_A_HIGHEST and norms[-1] > _GRADIENT_JUMP * max(norms[:-1]):
        before, now = max(norms[:-1]), norms[-1]
    else:
        return None
    return Diagnosis(
        EndCause.GRADIENT_SCALE,
        f"The gradient has another scale: its norm is {write_value(now)}, that of the steps before at most "
        f"{write_value(before)}, while neither rewards nor log-probs jumped.",
        ("See that gradients are divided by the loss scale, the number of micro-batches, and that of ranks.",),
    )


def entropy_collapse(window: Window) -> Diagnosis | None:
    """A guard saw it in one of the last steps. Where a policy is sure for longer, all its responses earn the same."""
    fired = _last_event(window, "policy/entropy")
    if fired is None or fired.step <= max(window.history) - _RECENT_STEPS:
        return None
    return Diagnosis(
        EndCause.ENTROPY_COLLAPSE,
        f"The policy gets sure without earning more by it: {fired.sentence}.",
        (
            "See whether advantages are centred within a prompt and whether the loss rewards certainty; then lower the "
            "learning rate, widen the upper clip, or add an entropy bonus.",
        ),
    )


def narrow_band(window: Window) -> Diagnosis | None:
    """A correction that takes out less and less while what it is there for grows."""
    fired = next(
        (event for event in reversed(window.events) if event.rule == "trend" and event.metric == "mismatch/kl_k3"), None
    )
    if fired is None:
        return None
    return Diagnosis(
        EndCause.NARROW_BAND,
        f"The correction loses hold of the mismatch: {fired.sentence}.",
        ("Take bounds that follow the mismatch, bound whole sequences, or bring the two sides closer.",),
    )


def harmful_updates(window: Window) -> Diagnosis | None:
    """The reward fell over several steps, and no update was so large that the rate alone is to blame."""
    fired = _last_event(window, "reward/mean")
    if fired is None or fired.rule not in ("trend", "growth"):
        return None
    shifts = [shift for shift in window.finite("update/policy_shift_k3") if shift > 0]
    moved = (
        f", by updates that moved the policy by {write_value(statistics.median(shifts))} nats each" if shifts else ""
    )
    return Diagnosis(
        EndCause.HARMFUL_UPDATES,
        f"The policy gets worse step by step: {fired.sentence}{moved}. The numbers do not tell a gradient that points "
        "the wrong way from a rate that is too high or problems that got harder.",
        (
            "Look at the sign of rewards, advantages, loss and gradient, and whether advantages are of the right "
            "responses; then lower the learning rate.",
            "Where the problems are meant to get harder, allow it (docs/guards.md, a harder curriculum).",
        ),
    )


def _last_event(window: Window, metric: str) -> GuardEvent | None:
    return next((event for event in reversed(window.events) if event.metric == metric), None)
