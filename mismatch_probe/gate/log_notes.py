"""What is not among the numbers of an imported log, beside an answer that rests on them."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.notation import write_count
from mismatch_probe.records.log_origin import LogOrigin

_MOST_STEPS_NAMED: Final = 20


def what_a_log_lacks(log: LogOrigin) -> Iterator[str]:
    """Steps and responses that were left out, and what was found missing or doubtful when the log was read."""
    if log.steps_left_out:
        named = ", ".join(map(str, log.steps_left_out[:_MOST_STEPS_NAMED]))
        more = len(log.steps_left_out) - _MOST_STEPS_NAMED
        yield f"steps of the log that are not judged: {named}{f' and {more} more' if more > 0 else ''}"
    if log.analysed_responses < log.num_responses:
        yield (f"judged: {write_count(log.analysed_responses)} of the log's {write_count(log.num_responses)} responses")
    yield from (f"of the log: {note.sentence}" for note in log.notes if note.level in ("missing", "warning"))
