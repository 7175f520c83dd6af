"""What it looks like when the engine does not hold the weights it was sent; None where a window does not show it."""

import math
import statistics

from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import Diagnosis, EndCause, Window
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.window_evidence import (
    LEAST_PROBE_ERROR,
    PROBE_ERROR,
    PROBE_JUMP,
    RECENT_STEPS,
    weights_are_equal,
)

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
