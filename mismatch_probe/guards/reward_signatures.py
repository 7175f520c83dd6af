"""What rewards that nothing can be learnt from look like; None where a window does not show it."""

import math
import statistics

from mismatch_probe.guards.diagnosis import Diagnosis, EndCause, Window
from mismatch_probe.guards.outside_causes import policy_is_calm
from mismatch_probe.guards.reward_jump import reward_jump
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.guards.rules.mean import newest_means
from mismatch_probe.notation import write_many

_FLAT_STEPS = 8
_CUT_STEPS = 3
_MOSTLY_CUT = 0.9
_OTHER_SCALE = 10.0
_MISTAKEN_SCALE = 1e5
_NEWEST = 2
_PAIRING_ERRORS = 4.0


def reward_scale(window: Window) -> Diagnosis | None:
    """One reward far beyond those of the steps before, which overflows whatever is computed of it, or the usual one."""
    largest = [value for value in window.finite("reward/largest") if value > 0]
    if len(largest) <= _NEWEST:
        return None
    before, now = largest[:-_NEWEST], max(largest[-_NEWEST:])
    typical = max(window.finite("reward/typical")[-_NEWEST:], default=0.0)
    if now < _MISTAKEN_SCALE * statistics.median(before) and typical < _OTHER_SCALE * max(before):
        return None
    return Diagnosis(
        EndCause.REWARD_SCALE,
        f"The rewards have another scale: one is {write_value(now)} in size, the largest of the steps before "
        f"{write_value(max(before))}.",
        ("Look at what the reward function gives for the responses of this step: another unit, a missing bound.",),
    )


def reward_late(window: Window) -> Diagnosis | None:
    late = window.last("reward/late")
    if not late:
        return None
    return Diagnosis(
        EndCause.REWARD_LATE,
        f"The reward function is too slow: for {write_many(round(late), 'response')} of the last step it took "
        "longer than task.reward_seconds.",
        ("Time it on the responses of this step; make it faster, raise the limit or task.reward_workers.",),
    )


def reward_nan(window: Window) -> Diagnosis | None:
    count, mean = window.last("reward/nonfinite"), window.last("reward/mean")
    if count:
        seen = f"{write_value(count)} of them"
    elif mean is not None and not math.isfinite(mean):
        seen = "some of them"
    else:
        return None
    return Diagnosis(
        EndCause.REWARD_NAN,
        f"The rewards of the last step cannot be learned from: {seen} are NaN or infinite.",
        ("Call the reward function on the responses of this step, and return 0 where it cannot judge one.",),
    )


def reward_unrepeated(window: Window) -> Diagnosis | None:
    pairs = zip(window.finite("reward/mispaired"), window.finite("reward/mispaired_error"), strict=False)
    of_others = [mean * steps for steps, mean, error in newest_means(list(pairs)) if mean > _PAIRING_ERRORS * error > 0]
    if of_others:
        return Diagnosis(
            EndCause.REWARD_UNREPEATED,
            f"Rewards do not belong to their responses: {write_value(of_others[0])} times in the last steps the "
            "reward function, asked twice again, gave one reward both times and not the one that was learnt from.",
            ("See whether rewards are paired with other responses, or changed on their way into the loss.",),
        )
    counts = window.finite("reward/unrepeated")[-_CUT_STEPS:]
    if len(counts) < _CUT_STEPS or min(counts) == 0:
        return None
    return Diagnosis(
        EndCause.REWARD_UNREPEATED,
        "Rewards do not repeat, or do not belong to their responses: asked again, the reward function gives "
        f"{write_value(counts[-1])} of a few responses of the last step another reward.",
        ("See whether rewards are paired with other responses, or whether the function gives one response two.",),
    )


def reward_changed(window: Window) -> Diagnosis | None:
    """The reward jumped from one step to the next and stayed there, while nothing says that the policy moved.

    A large update would have been named before.
    """
    jump = reward_jump(window)
    if jump is None or not policy_is_calm(window, jump.begun):
        return None
    levels = f"from {write_value(jump.before)} to {write_value(jump.after)}"
    when = f"at step {jump.begun}, although no update moved the policy far"
    ranges = [window.history[step].get("reward/whole_range") for step in window.history if step >= jump.begun]
    if not any(ranges) and None not in ranges:
        return Diagnosis(
            EndCause.FLAT,
            f"Nothing is learnt: the rewards are constant. They went {levels} {when}, and all responses earn the same "
            "since.",
            ("See whether the reward function judges anything since that step, and whether it can be reached.",),
        )
    return Diagnosis(
        EndCause.REWARD_CHANGED,
        f"The reward went {levels} {when}.",
        (
            "See whether the reward function, its data or the problems changed at that step, as in a curriculum whose "
            "problems get harder; where they were meant to, nothing is to be done.",
        ),
    )


def flat(window: Window) -> Diagnosis | None:
    """Steps in which no two responses to a prompt earned another reward."""
    shares = window.finite("reward/flat_groups_share")[-_FLAT_STEPS:]
    ranges = window.finite("reward/whole_range")[-_FLAT_STEPS:]
    if len(ranges) == _FLAT_STEPS and max(ranges) == 0:
        what = "all responses that were not cut earned the same"
    elif len(shares) == _FLAT_STEPS and min(shares) == 1:
        what = "all responses to a prompt earned the same"
    else:
        return None
    return Diagnosis(
        EndCause.FLAT,
        f"Nothing is learnt: in each of the last {_FLAT_STEPS} steps {what}.",
        ("Take problems that are solved now and then, and see whether the reward function judges anything.",),
    )


def truncated(window: Window) -> Diagnosis | None:
    """Responses that are cut off score alike, so that nothing is learnt."""
    recent = sorted(window.history)[-_CUT_STEPS:]
    shares = [window.history[step].get("response/truncated_share", 0.0) for step in recent]
    norms = [window.history[step].get("optim/grad_norm", math.nan) for step in recent]
    if len(recent) < _CUT_STEPS or min(shares) < _MOSTLY_CUT or any(norm != 0 for norm in norms):
        return None
    return Diagnosis(
        EndCause.TRUNCATED,
        f"Nothing is learnt: in each of the last {_CUT_STEPS} steps at least {write_value(100 * min(shares))} % of the "
        "responses were cut at the length limit, no two of a prompt earned another reward, and the gradient was 0.",
        (
            "Raise --max-new-tokens, or take an easier --task.",
            "See whether the model ends its responses at all: the chat template, the end-of-sequence token.",
        ),
    )
