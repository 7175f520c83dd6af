"""What a batch looks like that holds nothing, one side twice, or that comes again; None where a window does not show
it.
"""

from mismatch_probe.guards.diagnosis import Diagnosis, EndCause, Window
from mismatch_probe.guards.repeats import REPEATS, RETURNED
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.notation import write_many, write_percent
from mismatch_probe.stats.copies import CERTAIN_NATS

_COPIED = "mismatch/copied_share"
_COPIED_ROWS = "mismatch/copied_rows_share"
_REPEATED_STEPS = 3


def no_tokens(window: Window) -> Diagnosis | None:
    """No token of the last step counts."""
    if window.last("response/length_mean") != 0:
        return None
    in_a_row = 0
    for step in sorted(window.history, reverse=True):
        if window.history[step].get("response/length_mean") != 0:
            break
        in_a_row += 1
    return Diagnosis(
        EndCause.NO_TOKENS,
        f"No token counts: in the last {write_many(in_a_row, 'step')} the mask left none of any response, so nothing "
        "was measured and there is nothing to learn from.",
        (
            "See what sets the mask of the loss to 0: an inverted mask, a chat template that no longer marks the "
            "response, or a rule that masks all truncated responses.",
        ),
    )


def copied_side(window: Window) -> Diagnosis | None:
    """One side of the last step is a copy of the other, and nothing else fired there."""
    share = window.last(_COPIED)
    fired = {event.metric for event in window.events if event.step == max(window.history)}
    if not share or fired - {_COPIED}:
        return None
    return Diagnosis(
        EndCause.COPIED_SIDE,
        f"One side's log-probs are copied from the other's: they are equal bit for bit at {write_percent(share)} of "
        f"the tokens below -{CERTAIN_NATS:g}, so no mismatch was measured.",
        (
            "Give log-probs that each side computed; a bypass mode of the trainer copies the sampler's. Where kernels "
            "are the same on both sides, say computed_apart=True.",
        ),
    )


def copied_rows(window: Window) -> Diagnosis | None:
    """One side of some responses of the last step is a copy of the other."""
    share = window.last(_COPIED_ROWS)
    fired = {event.metric for event in window.events if event.step == max(window.history)}
    if not share or fired - {_COPIED_ROWS}:
        return None
    return Diagnosis(
        EndCause.COPIED_SIDE,
        f"In {write_percent(share)} of the responses one side's log-probs are copied from the other's, and hide what "
        "the others show: the mismatch was measured over all of them.",
        ("Give log-probs that each side computed, or leave these responses out of the mask.",),
    )


def batch_repeated(window: Window) -> Diagnosis | None:
    """The engine's log-probs have the same mean, but for the order of the sum, step after step or as some steps ago."""
    repeats, returned, mean = (window.last(name) or 0.0 for name in (REPEATS, RETURNED, "mismatch/logprob_mu"))
    if repeats + 1 >= _REPEATED_STEPS:
        when = f"in each of the last {round(repeats) + 1} steps"
    elif returned > 1:
        when = f"as {round(returned)} steps before"
    else:
        return None
    return Diagnosis(
        EndCause.BATCH_REPEATED,
        f"The same responses come again: {when} the mean log-prob of mu is {write_value(mean)}, to the last digit, and "
        "responses are as long.",
        ("See that each step samples anew. Where one batch is learnt from several times, judge it once.",),
    )
