"""What `diff` answers with: what changed between two runs, and what it did."""

from typing import Final, Literal

from mismatch_probe.notation import write_count
from mismatch_probe.records.summary import Counts, Record
from mismatch_probe.stats.results import Estimate

APPLIED: Final = "effective settings"
"""The kind of a change of what both sides really applied; its name begins with the stage."""


class Change(Record):
    """One thing that differs; `kind` is the part of the manifest it stands in."""

    kind: str
    name: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.name} {self.first} -> {self.second}"


class DifferenceSide(Record):
    """One of the two runs."""

    run: str
    model: str
    model_fingerprint: str
    created_at: str
    tool_version: str


class MetricDifference(Record):
    """A metric in both runs."""

    first: Estimate
    second: Estimate
    difference: Estimate | None
    """Second less first."""
    ratio: Estimate | None
    """Second / first, of positive values."""


class BinDifference(Record):
    """abs(d) of tokens at positions, or in responses of lengths, from `low` up to, not including, `high`."""

    low: int
    high: int
    abs_logprob_diff: MetricDifference

    @property
    def tokens(self) -> str:
        """`3 to 4`, numbered from 1."""
        first, last = self.low + 1, self.high
        return write_count(first) if first == last else f"{write_count(first)} to {write_count(last)}"


class PairDifference(Record):
    """One pair of dtypes (`TRAIN/INFER`) of the first run against one of the second."""

    first_pair: str
    second_pair: str
    comparison: Literal["paired", "two-sample"]
    """`paired` where every response has the same token ids in both runs."""
    shared_prompts: int
    shared_responses: int
    same_responses: int
    first_counts: Counts
    second_counts: Counts
    sentence: str
    no_ratio: str = ""
    """Why the metrics have no ratio, where one of the two is a bug or broken."""
    moved: dict[str, Estimate]
    """By side (`pi`, `mu`), how far its log-probs lie from its own in the other run, mean abs in nats, on the same
    tokens; empty where there are none.
    """
    metrics: dict[str, MetricDifference]
    by_position: list[BinDifference]
    by_response_length: list[BinDifference]


class Difference(Record):
    """Two runs side by side."""

    schema_version: int = 1
    tool_version: str
    first: DifferenceSide
    second: DifferenceSide
    rescored_with: str | None = None
    """The run whose settings the second was made with, from the first run's responses; mu's log-probs are then those
    of a prefill in both. None where the second run sampled its own.
    """
    changes: list[Change]
    pairs: list[PairDifference]
    only_first: list[str]
    only_second: list[str]
