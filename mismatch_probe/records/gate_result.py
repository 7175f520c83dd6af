"""`gate.json`: the whole answer, which the console, JUnit, Markdown and GitHub read."""

from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, ValidationError

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.atomic import read_regular_text
from mismatch_probe.records.summary import Record

GATE_FILE: Final = "gate.json"
JUNIT_FILE: Final = "junit.xml"

GROWTH: Final = "growth_over_steps"
"""The metric of the row that says whether the KL of a log grows over its steps."""

CheckKind = Literal["max", "min", "max_regression", "equal"]
CheckAnswer = Literal["pass", "fail", "inconclusive"]


class CheckResult(Record):
    """One limit on one pair of dtypes."""

    metric: str
    measured: str
    pair: str
    kind: CheckKind
    limit: float
    level: Literal["warn", "error"]
    answer: CheckAnswer
    sentence: str
    value: float
    """What the limit is put on. With `max_regression` that is how much worse the run is than the baseline, as a share;
    `run_value` and `baseline_value` are the metric itself.
    """
    low: float | None
    """One-sided bound of `value` at the look's nominal level `bound_level`, wrong at most that often."""
    high: float | None
    """One-sided bound of `value` at the look's nominal level `bound_level`, wrong at most that often."""
    bound_level: float
    p_value: float | None
    """Of the data if the limit were just met; `holm_level` is what it must not exceed for the check to fail."""
    holm_level: float | None
    passing_limit: float | None
    """The tightest limit that would pass; None where there are too few prompts for any to."""
    run_value: float
    baseline_value: float | None
    comparison: Literal["paired", "two-sample"] | None
    num_sequences: int
    num_tokens: int
    num_prompts: int | None = None
    """Of the responses that the check looks at; None for what `headroom` or `localize` found."""
    left_out: float = 0.0
    """Share of the tokens of a log, or of their surprisal where that is more, without a log-prob: too large a one is
    never a pass.
    """
    tail_is_open: bool = False
    """`low` and `high` keep the limit, and what is too rare for the sample may break it."""
    waits_for: str = ""
    """What an undecided check waits for, in the same words for all checks that wait for the same thing."""
    tokens_to_decide: int | None = None
    """About how many tokens pass, were they like these."""
    by: Literal["token", "sequence"]
    source: str


class Look(Record):
    """Which look this was."""

    number: int
    declared: list[int]
    num_sequences: int
    num_prompts: int | None = None
    """Of the pair of dtypes that has the fewest usable ones."""
    min_prompts: int | None = None
    """What a pass needs."""
    fraction: float
    """Of the sequences of the last look."""
    spent: float
    """Of alpha, up to this look."""
    nominal_level: float

    @property
    def next_sequences(self) -> int | None:
        """Sequences of the next look; None after the last."""
        return self.declared[self.number] if self.number < len(self.declared) else None


class GateResult(Record):
    """The answer of a gate; `error` means that nothing was decided, and is never a pass."""

    schema_version: int = 1
    tool_version: str
    answer: Literal["pass", "fail", "inconclusive", "error"]
    exit_code: ExitCode
    sentence: str
    next_command: str | None = None
    """What goes on to the next look, where a command does."""
    run: str
    gate_file: str
    gate_key: str | None = None
    model: str | None = None
    model_fingerprint: str | None = None
    baseline: str | None = None
    alpha: float | None = None
    on_inconclusive: str | None = None
    look: Look | None = None
    checks: list[CheckResult] = []
    notes: list[str] = []
    left_out: list[str] = []
    """Checks that compare with a baseline, where there is none yet."""
    versions: dict[str, str] = {}


def answer_of(run: Path) -> GateResult | None:
    """The last answer about a run; None where none stands, or none that can be read."""
    try:
        return GateResult.model_validate_json(read_regular_text(run / GATE_FILE))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


class FloorEntry(Record):
    """The floor of one measured thing of one pair; None where it was not measured."""

    pair: str
    measured: str
    same_leg: float | None
    """Its largest value between the same leg computed twice on the same ids, within a run or in two."""
    change: float | None
    """The largest relative change between repeated runs, its bound included."""

    @property
    def is_measured(self) -> bool:
        return self.same_leg is not None or self.change is not None


class NoiseFloor(Record):
    """`floor.json`: made by `gate calibrate` from runs of one set-up, read by `gate`."""

    model_config = ConfigDict(title="Floor")

    schema_version: int = 1
    model_fingerprint: str
    runs: list[str]
    num_sequences: int
    entries: list[FloorEntry]
