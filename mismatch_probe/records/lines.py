"""Records of curves: metrics and events of a training run line by line, what `watch` saw, what metrics alone tell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mismatch_probe.errors import BrokenRecord, ExitCode
from mismatch_probe.reading import Unreadable, as_object, open_text_file, parse_json, storable
from mismatch_probe.records.files import CURVES_FILE
from mismatch_probe.records.manifest import first_problem, read_document, write_document
from mismatch_probe.records.summary import Record, Verdict
from mismatch_probe.stats.results import StepGrowth

NONFINITE: Final = "nonfinite"

Step = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, BeforeValidator(lambda value: storable(value) if isinstance(value, str) else value)]
NonfiniteText = Literal["nan", "inf", "-inf"]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True)

    step: Step


class MetricsLine(_Line):
    """Metrics of one step; those that are not finite are null, and under `nonfinite` what they were."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None]

    nonfinite: dict[str, NonfiniteText]

    @model_validator(mode="after")
    def _accounts_for_nulls(self) -> "MetricsLine":
        odd = {name for name, value in self.__pydantic_extra__.items() if value is None} ^ self.nonfinite.keys()
        if odd:
            raise ValueError(f"{min(odd)} is null, or named under {NONFINITE}, and not both")
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """Each metric with the value that it had."""
        values = {name: value for name, value in self.__pydantic_extra__.items() if value is not None}
        return {**values, **{name: float(value) for name, value in self.nonfinite.items()}}


class EventLine(_Line):
    """A guard that fired."""

    guard: Text
    rule: Text
    metric: Text
    value: float | NonfiniteText
    threshold: float | NonfiniteText
    firing: int
    actions: list[Text]
    sentence: Text


_Kind = TypeVar("_Kind", bound=_Line)


def read_run_lines(path: Path, kind: type[_Kind]) -> Iterator[tuple[_Kind, str]]:
    """Each complete line, parsed and as text; a last line that a killed process cut off is left out.

    Raises:
        BrokenRecord: the file cannot be read, or a line is none of this kind.
    """
    number = 0
    try:
        with open_text_file(path) as lines:
            for text in lines:
                number += 1
                if not text.endswith("\n"):
                    return
                yield kind.model_validate(as_object(parse_json(text))), text
    except FileNotFoundError:
        return
    except ValidationError as error:
        raise _broken_line(path, number, first_problem(error)) from error
    except Unreadable as error:
        raise _broken_line(path, number, str(error)) from error


def _broken_line(path: Path, number: int, reason: str) -> BrokenRecord:
    if not number:
        return BrokenRecord(f"{path} cannot be read ({reason}); put the file back, or train again")
    return BrokenRecord(
        f"line {number} of {path} cannot be read ({reason}); remove it and what follows, and train on with --resume"
    )


CURVES_VERSION: Final = 1


class PublishedBand(Record):
    """A number that somebody published, or a limit in use, for a metric."""

    kind: Literal["dense", "mixture", "any"]
    """Of which models it is: dense ones, mixtures of experts, or the source does not say."""
    low: float | None
    high: float | None
    words: str
    """What it is: `BF16, Qwen3-1.7B`."""
    source: str
    relation: Literal["below", "within", "above"]
    """Where the latest level of the curve lies."""


class MetricCurve(Record):
    """A curve under the trainer's name, and what it is called here."""

    name: str
    trainer: str
    metric: str
    """Ours, or a quantity that trainers log and that is none of ours."""
    words: str
    meaning: str
    note: str = ""
    """How the trainer's differs from ours."""
    source: str
    """The file that computes it, with its repository and commit."""
    num_steps: int
    num_nonfinite: int = 0
    steps: list[int]
    """Some of the steps where there are very many."""
    values: list[float | None]
    """None where the value is not finite."""
    shape: Literal["flat", "growing", "falling", "step_up", "step_down", "sawtooth", "unsure", "too_short", "other"]
    """`other` of what is no deviation, whose shape is not judged."""
    shape_words: str = ""
    first_level: float
    last_level: float
    p_value: float | None = None
    """That chance alone changes the level so far; None where the shape is not judged."""
    at_step: int | None = None
    """The step of a step, or at which growth begins."""
    bands: list[PublishedBand] = []


class Contradiction(Record):
    """Two numbers that cannot both be what their names say, or one that cannot be."""

    law: str
    sentence: str
    means: str
    """What it says of the numbers, and what to do."""
    curves: list[str]
    num_steps: int
    """Steps at which the law is broken."""
    num_judged: int
    first_step: int
    is_exact: bool
    """No rounding and no bad luck breaks the law; else an estimate is void."""


class NextColumn(Record):
    """A column to log, and what it would show."""

    name: str
    shows: str
    how: str
    """How the trainer is made to log it."""


WATCH_VERSION = 1


class WatchedStep(Record):
    """A step of a log."""

    step: int
    num_responses: int
    num_tokens: int
    left_out_tokens: int = 0
    """Those without a log-prob on a side."""
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]]
    """By name, a number, or the name of what is none; empty where it was not judged."""
    findings: list[str] = []
    """Codes of what makes its numbers doubtful."""
    events: list[dict[str, Any]] = []
    """Firings, as `train` records them."""


class WatchRecord(Record):
    """How a log was watched to its end, or until a guard asked to stop."""

    schema_version: int = WATCH_VERSION
    tool_version: str
    source: str
    format: str | None
    """None where the folder held no log."""
    guards_off: dict[str, list[str]]
    """The guards that the log cannot serve, and what each lacks."""
    num_guards: int = 0
    """All guards, those that are off among them."""
    steps: list[WatchedStep]
    num_judged: int = 0
    """Steps that every other guard judged."""
    judged_in_part: list[int] = []
    """Steps that some guards judged."""
    not_judged: list[int] = []
    """Steps that no guard judged."""
    unfinished: list[int] = []
    """Steps that were incomplete at the end, and were not judged."""
    vanished: list[int] = []
    """Steps whose files went away before they were read."""
    absent: list[int] = []
    """Numbers of steps that the log leaves out between those that it has."""
    rewritten: list[int] = []
    """Steps that were written to again after they were judged."""
    short: list[int] = []
    """Steps with far fewer responses than the others, whose files may be cut off."""
    stopped_at: int | None
    """The step at which a guard asked to stop; None where none did."""
    growth: StepGrowth | None = None
    """How the KL grows over the steps that were judged, by the test that an imported log has; None where no growth is
    shown.
    """
    can_show_growth: bool = False
    """Whether the steps that were judged have enough responses to show a growth."""
    curve: MetricCurve | None = None
    """Of metrics alone: the curve that measures the mismatch, with its shape."""
    contradictions: list[Contradiction] = []
    """Of metrics alone: numbers that cannot all be what their names say."""
    causes: list[str] = []
    """Of metrics alone: what fits the shape of the curve; what another metric speaks for comes first."""
    next_columns: list[NextColumn] = []
    """Of metrics alone: what to log next."""
    bounds: dict[str, str] = {}
    """Metrics of the steps that were not logged, and of which a bound stands there, with a sentence on it."""
    cause: str | None = None
    """The code of the likely cause, where a guard asked for more than a warning; `unexplained` where no known one fits.
    """
    diagnosis: str | None
    """That cause in words, or what is known where none fits."""
    answer: Literal["pass", "fail", "inconclusive", "broken"] | None = None
    """What the exit code says, in a word; None where the watch was interrupted or the log could not be followed to its
    end.
    """
    exit_code: ExitCode | None = None
    """None where `answer` is."""
    reason: str | None = None
    """Why the exit code is what it is; None where `answer` is."""
    counts: str = ""
    """How many steps were judged, and which were not."""


class CurveReading(Record):
    """What the metrics of a training run tell."""

    schema_version: int = CURVES_VERSION
    tool_version: str
    created_at: str
    source: str
    kind: str
    """What the file is, in words."""
    files: list[str]
    trainers: list[str]
    first_step: int
    last_step: int
    num_steps: int
    verdict: Verdict
    headline_curve: str
    """The name of the curve that the headline is about."""
    curves: list[MetricCurve]
    contradictions: list[Contradiction] = []
    causes: list[str] = []
    """What fits the shape; what another metric speaks for comes first, what one speaks against comes last."""
    open_questions: list[str] = []
    """What metrics alone cannot answer."""
    next_columns: list[NextColumn] = []
    num_unknown: int = 0
    unknown: list[str] = []
    """Names that were not read, some of them."""
    notes: list[str] = []

    @property
    def exit_code(self) -> ExitCode:
        """Numbers that contradict each other must not be trusted."""
        return ExitCode.ENVIRONMENT if self.verdict.kind == "broken" else ExitCode.PASS


class CurvesDirectory:
    """The folder of a reading and its page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_path = path / CURVES_FILE
        self.report_path = path / "report.html"

    def write(self, reading: CurveReading) -> None:
        """
        Raises:
            StorageError: the disk refused the write.
        """
        write_document(self.record_path, reading)

    def read(self) -> CurveReading:
        """
        Raises:
            RunDirectoryError: it is not there.
            BrokenRecord: it is damaged, or of another version.
        """
        return read_document(
            self.record_path, CurveReading, missing="no metrics were imported", fix="import them again"
        )
