"""What `diff`, `evaluate` and `gate` answer with: the JSON document of each."""

from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, ValidationError

from mismatch_probe.config.model import EvaluationSettings
from mismatch_probe.config.sides import Side, SideName
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.notation import write_count
from mismatch_probe.records.files import EVALUATION, read_regular_text
from mismatch_probe.records.manifest import read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Counts, OfSides, Record
from mismatch_probe.stats.results import LEVEL, Estimate

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


class EngineAccuracy(OfSides):
    """What responses of an engine's side earn on average."""

    infer: SideName
    infer_dtype: Dtype
    accuracy: Estimate
    truncated_responses: int


class EngineDifference(Record):
    """Accuracy of the engine's side `of` minus that of `over`, on the same problems."""

    of: SideName
    over: SideName
    difference: Estimate


class DirectAccuracy(Record):
    """What responses sampled on the training path earn;"""

    accuracy: Estimate
    gap: Estimate
    """That minus accuracy under mu, on the same problems."""
    truncated_responses: int


class PairAccuracy(OfSides):
    """The deployment gap of a pair of sides."""

    train: SideName
    infer: SideName
    train_dtype: Dtype
    infer_dtype: Dtype
    under_mu: Estimate | None
    """Of the responses that both sides scored."""
    ess: Estimate | None
    under_pi: Estimate | None
    """Of the same ones, each weighing pi/mu."""
    gap: Estimate | None
    """`under_pi` minus `under_mu`, positive where deployment loses. Both are None where ess, the share of the responses
    that the weights leave, is too small, which `undecided` says.
    """
    responses_left_out: int
    undecided: str | None = None
    direct: DirectAccuracy | None = None
    """From responses of pi itself, where asked for."""


class Evaluation(Record):
    """The whole answer; the lists are empty until everything is sampled and scored."""

    evaluation_version: int = 1
    tool_version: str
    model: str
    model_fingerprint: str
    task: str
    settings: EvaluationSettings
    state: Literal["unfinished", "finished"] = "unfinished"
    engines: list[EngineAccuracy] = []
    differences: list[EngineDifference] = []
    pairs: list[PairAccuracy] = []


class EvaluationDirectory(RunDirectory):
    """A comparison's directory with the evaluation's own files."""

    @property
    def evaluation_path(self) -> Path:
        return self.path / EVALUATION

    def pi_rollouts_path(self, pi: Side) -> Path:
        return self.path / f"rollouts-{pi.sampler}.parquet"

    def write_evaluation(self, evaluation: Evaluation) -> None:
        write_document(self.evaluation_path, evaluation)

    def read_evaluation(self) -> Evaluation:
        return read_document(
            self.evaluation_path,
            Evaluation,
            missing="no evaluation was started here; give another --out",
            fix="evaluate again",
        )


GATE_FILE: Final = "gate.json"
JUNIT_FILE: Final = "junit.xml"

GROWTH: Final = "growth_over_steps"
VERDICT: Final = "verdict"
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
    run_low: float | None = None
    """Of `run_value`, at the level of the run's own intervals, which set its digits; None where it has none."""
    run_high: float | None = None
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

    @property
    def run_metric(self) -> Estimate:
        """The metric itself, with the interval that the run gives it."""
        return Estimate(
            self.run_value, self.run_low, self.run_high, LEVEL, self.num_sequences, self.num_tokens, self.by
        )

    @property
    def is_untested(self) -> bool:
        """Whether the check is open because the run has nothing that it could look at: then `value` says nothing."""
        return self.answer == "inconclusive" and not self.num_tokens


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
