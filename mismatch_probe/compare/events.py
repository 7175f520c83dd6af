"""What a job of a comparison tells its parent while it runs."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.cost.rates import Process


class Event(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobStarted(Event):
    """A process begins to load what the first of its stages needs."""

    kind: Literal["job_started"] = "job_started"
    process: Process
    stages: list[str]


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


class LayersDone(Event):
    """How far a reference is that goes layer by layer through all of its batches at once."""

    kind: Literal["layers_done"] = "layers_done"
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


AnyEvent = Annotated[
    JobStarted | StageStarted | EffectiveSettings | RequestsDone | LayersDone | BatchDone | StageDone,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def send_event(events: Send, event: Event) -> None:
    events(event.model_dump(mode="json"))


def parse(message: Any) -> AnyEvent:
    return _ADAPTER.validate_python(message)
