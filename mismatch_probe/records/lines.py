"""Records line by line: metrics and events of a training run, and what `watch` saw."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mismatch_probe.errors import BrokenRecord, ExitCode
from mismatch_probe.reading import Unreadable, as_object, open_text_file, parse_json, storable
from mismatch_probe.records.manifest import first_problem
from mismatch_probe.records.summary import Record

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
    diagnosis: str | None
    """The likely cause, where a guard asked for more than a warning."""
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
