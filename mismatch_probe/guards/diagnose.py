"""From the last steps' metrics and what fired to the most likely cause, in one sentence, and what to do about it."""

from collections.abc import Mapping, Sequence
from typing import Final

from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnosis import Diagnosis, Window
from mismatch_probe.guards.end_signatures import (
    fp16_dead,
    learning_rate,
    missing_logprobs,
    no_end,
    nonfinite_gradient,
    unexplained,
)
from mismatch_probe.guards.learning_signatures import (
    batch_repeated,
    copied_rows,
    copied_side,
    entropy_collapse,
    flat,
    gradient_scale,
    harmful_updates,
    narrow_band,
    no_tokens,
    reward_changed,
    reward_late,
    reward_nan,
    reward_scale,
    reward_unrepeated,
    truncated,
)
from mismatch_probe.guards.mismatch_signatures import (
    computation,
    label_offset,
    mispaired,
    other_scores,
    precision_drift,
    tokens_replaced,
)
from mismatch_probe.guards.rules.base import Values
from mismatch_probe.guards.sync_signatures import (
    engine_weights,
    other_base,
    partial_sync,
    sampling,
    stale_sync,
    support,
    temperature,
)

_SIGNATURES: Final = (
    no_tokens,
    copied_side,
    copied_rows,
    reward_scale,
    fp16_dead,
    missing_logprobs,
    reward_late,
    reward_nan,
    nonfinite_gradient,
    truncated,
    no_end,
    reward_unrepeated,
    batch_repeated,
    other_base,
    mispaired,
    label_offset,
    stale_sync,
    partial_sync,
    temperature,
    tokens_replaced,
    learning_rate,
    computation,
    engine_weights,
    sampling,
    support,
    other_scores,
    gradient_scale,
    reward_changed,
    entropy_collapse,
    flat,
    precision_drift,
    narrow_band,
    harmful_updates,
)
"""In the order of `EndCause`."""


def diagnose(history: Mapping[int, Values], events: Sequence[GuardEvent]) -> Diagnosis:
    """The first cause whose signature the window shows.

    history: metrics of the last steps by step number, the newest included; a dozen is enough, since the signatures are
    jumps and levels. events: the firings of the run; those of other steps are left out.
    """
    window = Window(dict(sorted(history.items())), [event for event in events if event.step in history])
    return next((seen for signature in _SIGNATURES if (seen := signature(window))), unexplained(window))
