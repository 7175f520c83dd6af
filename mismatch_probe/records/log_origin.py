"""What an imported run says of the log that it was made from."""

from typing import Any, Literal

from mismatch_probe.records.documents import Entry


class LogFile(Entry):
    """A file of the log as it was read. complete: what its writer says of that, None where it has no such sign."""

    path: str
    size_bytes: int
    modified_at: str
    step: int | None = None
    complete: bool | None = None


class LogNote(Entry):
    """Something that was seen in the log before any number was computed.

    level: broken, no number may be computed; missing, the values it names were not recorded and are left out; warning,
    numbers may mean something else than they seem to; note, they are not touched. column: what it is about (`log_mu`,
    `log_pi`), None for the rows.
    """

    level: Literal["broken", "missing", "warning", "note"]
    code: str
    sentence: str
    column: str | None = None
    evidence: dict[str, Any] = {}


class LogOrigin(Entry):
    """Where an imported run's responses and log-probs come from.

    num_responses, num_tokens: of the whole log; num_sampled_tokens: those that the policy sampled. analysed_responses,
    analysed_tokens: what the statistics are computed from, whole prompts chosen at random where the log is larger.
    steps_left_out: steps of training of which no response is analysed. models: names that the log gives to what sampled
    it, without those of weight versions. assumed: what the log does not say, by name, as it was taken to be.
    """

    format: str
    files: list[LogFile]
    num_responses: int
    num_tokens: int
    num_sampled_tokens: int
    analysed_responses: int
    analysed_tokens: int
    steps_left_out: list[int] = []
    models: list[str] = []
    assumed: dict[str, str] = {}
    notes: list[LogNote] = []
