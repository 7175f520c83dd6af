"""What a child process tells its parent: one JSON object a line, on a pipe of its own."""

import json
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mismatch_probe import errors


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageStarted(Event):
    kind: Literal["stage_started"] = "stage_started"
    stage: str
    batches: int
    batches_done: int


class EffectiveSettings(Event):
    """Read back from what runs."""

    kind: Literal["effective_settings"] = "effective_settings"
    stage: str
    settings: dict[str, Any]


class RequestsDone(Event):
    """How far a batch in flight is; not how long it will take: requests run side by side, and the longest end late."""

    kind: Literal["requests_done"] = "requests_done"
    stage: str
    done: int
    of: int


class BatchDone(Event):
    kind: Literal["batch_done"] = "batch_done"
    stage: str
    sequences: int
    tokens: int
    seconds: float


class StageDone(Event):
    kind: Literal["stage_done"] = "stage_done"
    stage: str
    skipped: bool = False
    note: str = ""


class Failure(Event):
    """An error with a sentence; `error` names its class in `mismatch_probe.errors`."""

    kind: Literal["failure"] = "failure"
    error: str
    message: str

    def as_exception(self) -> errors.MismatchProbeError:
        found = getattr(errors, self.error, errors.EngineError)
        return found(self.message)


AnyEvent = Annotated[
    StageStarted | EffectiveSettings | RequestsDone | BatchDone | StageDone | Failure,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def send(stream: IO[str], event: Event) -> None:
    stream.write(json.dumps(event.model_dump(mode="json")) + "\n")
    stream.flush()


def parse(line: str) -> AnyEvent:
    return _ADAPTER.validate_json(line)
