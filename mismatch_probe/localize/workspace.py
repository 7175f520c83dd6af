"""The files that the jobs of one localization pass to each other, and what both jobs are told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.records.activations import ActivationStore
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.localize import Side

ENGINE: Final = "engine"
TRAINING: Final = "training"
"""The two jobs of every localization; any other is a switch of the engine."""


class JobInput(BaseModel):
    """What a job needs to know. max_stored_tokens: tokens whose activations may be kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: LocalizeSettings
    folder: str
    max_model_len: int
    max_stored_tokens: int
    logit_rows: int


class TrialNotes(BaseModel):
    """One scoring of every response; `part` is what computed in FP32, empty where nothing did."""

    part: str
    side: Side
    seconds: float
    extra_bytes: int

    @property
    def leg(self) -> str:
        return f"{self.side}-with-{self.part.replace(' ', '-')}"


class JobNotes(BaseModel):
    """What a job has to say about itself besides its files."""

    seconds: dict[str, float] = {}
    stored_bytes: int = 0
    peak_memory_bytes: int = 0
    layout: dict[str, Any] = {}
    trials: list[TrialNotes] = []
    left_out: dict[str, str] = {}


@dataclass(frozen=True)
class Workspace:
    path: Path

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.parquet"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.parquet"

    @property
    def sums(self) -> Path:
        return self.path / "sums.npz"

    @property
    def activations(self) -> ActivationStore:
        return ActivationStore(self.path / "activations")

    def leg(self, name: str) -> Path:
        return self.path / f"leg-{name}.parquet"

    def log(self, job: str) -> Path:
        return self.path / f"{job}.log"

    def read_task(self) -> JobInput:
        return JobInput.model_validate_json((self.path / "task.json").read_text(encoding="utf-8"))

    def write_task(self, task: JobInput) -> None:
        write_text(self.path / "task.json", task.model_dump_json())
