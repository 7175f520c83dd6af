"""What a run looks like from which nothing can be learnt: its batches, its rewards, its course."""

import math
import statistics

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.diagnosis import ENDINGS, Diagnosis, GuardEvent, Window
from mismatch_probe.guards.recovery import policy_is_calm
from mismatch_probe.guards.rewards import REPEATS, RETURNED, reward_jump
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.rules.mean import newest_means
from mismatch_probe.notation import write_many, write_percent
from mismatch_probe.stats.copies import CERTAIN_NATS

_COPIED = "mismatch/copied_share"
_COPIED_ROWS = "mismatch/copied_rows_share"
_REPEATED_STEPS = 3


@ENDINGS.of(EndCause.NO_TOKENS)
def no_tokens(window: Window) -> Diagnosis | None:
    """No token of the last step counts."""
    if window.last("response/length_mean") != 0:
        return None
    in_a_row = 0
    for step in sorted(window.history, reverse=True):
        if window.history[step].get("response/length_mean") != 0:
            break
        in_a_row += 1
    return Diagnosis.of(EndCause.NO_TOKENS, steps=write_many(in_a_row, "step"))


@ENDINGS.of(EndCause.COPIED_SIDE)
def copied_side(window: Window) -> Diagnosis | None:
    """One side of the last step is a copy of the other, and nothing else fired there."""
    share = window.last(_COPIED)
    metrics = {event.metric for event in window.events if event.step == max(window.history)}
    if not share or metrics - {_COPIED}:
        return None
    return Diagnosis.of(EndCause.COPIED_SIDE, share=write_percent(share), certain=CERTAIN_NATS)


@ENDINGS.of((EndCause.COPIED_SIDE, "rows"))
def copied_rows(window: Window) -> Diagnosis | None:
    """One side of some responses of the last step is a copy of the other."""
    share = window.last(_COPIED_ROWS)
    metrics = {event.metric for event in window.events if event.step == max(window.history)}
    if not share or metrics - {_COPIED_ROWS}:
        return None
    return Diagnosis.of(EndCause.COPIED_SIDE, "rows", share=write_percent(share))


@ENDINGS.of(EndCause.BATCH_REPEATED)
def batch_repeated(window: Window) -> Diagnosis | None:
    """The engine's log-probs have the same mean, but for the order of the sum, step after step or as some steps ago."""
    repeats, period, mean = (window.last(name) or 0.0 for name in (REPEATS, RETURNED, "mismatch/logprob_mu"))
    if repeats + 1 >= _REPEATED_STEPS:
        when = f"in each of the last {round(repeats) + 1} steps"
    elif period > 1:
        when = f"as {round(period)} steps before"
    else:
        return None
    return Diagnosis.of(EndCause.BATCH_REPEATED, when=when, mean=write_value(mean))


_GRADIENT_JUMP = 20.0
_STEPS_FOR_A_HIGHEST = 4
_RECENT_STEPS = 4


@ENDINGS.of(EndCause.GRADIENT_SCALE)
def gradient_scale(window: Window) -> Diagnosis | None:
    """The gradient's norm jumped beyond all those before it, although nothing else did."""
    norms = [norm for norm in window.finite("optim/grad_norm") if norm > 0]
    event = _last_event(window, "optim/grad_norm")
    if event is not None and event.rule == "beyond" and math.isfinite(event.value):
        level, norm = event.threshold / _GRADIENT_JUMP, event.value
    elif len(norms) > _STEPS_FOR_A_HIGHEST and norms[-1] > _GRADIENT_JUMP * max(norms[:-1]):
        level, norm = max(norms[:-1]), norms[-1]
    else:
        return None
    return Diagnosis.of(EndCause.GRADIENT_SCALE, now=write_value(norm), before=write_value(level))


@ENDINGS.of(EndCause.ENTROPY_COLLAPSE)
def entropy_collapse(window: Window) -> Diagnosis | None:
    """A guard saw it in one of the last steps. Where a policy is sure for longer, all its responses earn the same."""
    event = _last_event(window, "policy/entropy")
    if event is None or event.step <= max(window.history) - _RECENT_STEPS:
        return None
    return Diagnosis.of(EndCause.ENTROPY_COLLAPSE, seen=event.sentence)


@ENDINGS.of(EndCause.NARROW_BAND)
def narrow_band(window: Window) -> Diagnosis | None:
    """A correction that takes out less and less while what it is there for grows."""
    event = next(
        (event for event in reversed(window.events) if event.rule == "trend" and event.metric == "mismatch/kl_k3"), None
    )
    if event is None:
        return None
    return Diagnosis.of(EndCause.NARROW_BAND, seen=event.sentence)


@ENDINGS.of(EndCause.HARMFUL_UPDATES)
def harmful_updates(window: Window) -> Diagnosis | None:
    """The reward fell over several steps, and no update was so large that the rate alone is to blame."""
    event = _last_event(window, "reward/mean")
    if event is None or event.rule not in ("trend", "growth"):
        return None
    shifts = [shift for shift in window.finite("update/policy_shift_k3") if shift > 0]
    size = f", by updates that moved the policy by {write_value(statistics.median(shifts))} nats each" if shifts else ""
    return Diagnosis.of(EndCause.HARMFUL_UPDATES, seen=f"{event.sentence}{size}")


def _last_event(window: Window, metric: str) -> GuardEvent | None:
    return next((event for event in reversed(window.events) if event.metric == metric), None)


_FLAT_STEPS = 8
_CUT_STEPS = 3
_MOSTLY_CUT = 0.9
_OTHER_SCALE = 10.0
_MISTAKEN_SCALE = 1e5
_NEWEST = 2
_PAIRING_ERRORS = 4.0


@ENDINGS.of(EndCause.REWARD_SCALE)
def reward_scale(window: Window) -> Diagnosis | None:
    """One reward far beyond those of the steps before, which overflows whatever is computed of it, or the usual one."""
    largest = [value for value in window.finite("reward/largest") if value > 0]
    if len(largest) <= _NEWEST:
        return None
    history, newest = largest[:-_NEWEST], max(largest[-_NEWEST:])
    typical = max(window.finite("reward/typical")[-_NEWEST:], default=0.0)
    if newest < _MISTAKEN_SCALE * statistics.median(history) and typical < _OTHER_SCALE * max(history):
        return None
    return Diagnosis.of(EndCause.REWARD_SCALE, now=write_value(newest), before=write_value(max(history)))


@ENDINGS.of(EndCause.REWARD_LATE)
def reward_late(window: Window) -> Diagnosis | None:
    num_late = window.last("reward/late")
    if not num_late:
        return None
    return Diagnosis.of(EndCause.REWARD_LATE, responses=write_many(round(num_late), "response"))


@ENDINGS.of(EndCause.REWARD_NAN)
def reward_nan(window: Window) -> Diagnosis | None:
    count, mean = window.last("reward/nonfinite"), window.last("reward/mean")
    if count:
        evidence = f"{write_value(count)} of them"
    elif mean is not None and not math.isfinite(mean):
        evidence = "some of them"
    else:
        return None
    return Diagnosis.of(EndCause.REWARD_NAN, seen=evidence)


@ENDINGS.of(EndCause.REWARD_UNREPEATED)
def reward_unrepeated(window: Window) -> Diagnosis | None:
    pairs = zip(window.finite("reward/mispaired"), window.finite("reward/mispaired_error"), strict=False)
    of_others = [mean * steps for steps, mean, error in newest_means(list(pairs)) if mean > _PAIRING_ERRORS * error > 0]
    if of_others:
        return Diagnosis.of(EndCause.REWARD_UNREPEATED, "mispaired", times=write_value(of_others[0]))
    counts = window.finite("reward/unrepeated")[-_CUT_STEPS:]
    if len(counts) < _CUT_STEPS or min(counts) == 0:
        return None
    return Diagnosis.of(EndCause.REWARD_UNREPEATED, count=write_value(counts[-1]))


@ENDINGS.of(EndCause.REWARD_CHANGED)
def reward_changed(window: Window) -> Diagnosis | None:
    """The reward jumped from one step to the next and stayed there, while nothing says that the policy moved.

    A large update would have been named before.
    """
    jump = reward_jump(window)
    if jump is None or not policy_is_calm(window, jump.first_step):
        return None
    levels = f"from {write_value(jump.level_before)} to {write_value(jump.level_after)}"
    when = f"at step {jump.first_step}, although no update moved the policy far"
    ranges = [window.history[step].get("reward/whole_range") for step in window.history if step >= jump.first_step]
    if not any(ranges) and None not in ranges:
        return Diagnosis.of(EndCause.FLAT, "constant", levels=levels, when=when)
    return Diagnosis.of(EndCause.REWARD_CHANGED, levels=levels, when=when)


@ENDINGS.of(EndCause.FLAT)
def flat_rewards(window: Window) -> Diagnosis | None:
    """Steps in which no two responses to a prompt earned another reward."""
    shares = window.finite("reward/flat_groups_share")[-_FLAT_STEPS:]
    ranges = window.finite("reward/whole_range")[-_FLAT_STEPS:]
    if len(ranges) == _FLAT_STEPS and max(ranges) == 0:
        what = "all responses that were not cut earned the same"
    elif len(shares) == _FLAT_STEPS and min(shares) == 1:
        what = "all responses to a prompt earned the same"
    else:
        return None
    return Diagnosis.of(EndCause.FLAT, steps=_FLAT_STEPS, what=what)


@ENDINGS.of(EndCause.TRUNCATED)
def truncated_responses(window: Window) -> Diagnosis | None:
    """Responses that are cut off score alike, so that nothing is learnt; no reason of a stop that a guard on the
    mismatch asked for.
    """
    stops = [event.metric for event in window.events if any(action.kind == ActionKind.STOP for action in event.actions)]
    if any(metric.startswith(("mismatch/", "sync/")) for metric in stops):
        return None
    recent = sorted(window.history)[-_CUT_STEPS:]
    shares = [window.history[step].get("response/truncated_share", 0.0) for step in recent]
    norms = [window.history[step].get("optim/grad_norm", math.nan) for step in recent]
    if len(recent) < _CUT_STEPS or min(shares) < _MOSTLY_CUT or any(norm != 0 for norm in norms):
        return None
    return Diagnosis.of(EndCause.TRUNCATED, steps=_CUT_STEPS, percent=write_value(100 * min(shares)))
