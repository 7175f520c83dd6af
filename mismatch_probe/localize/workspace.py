"""The files that the jobs of one localization pass to each other, and which sequences they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import PairSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.activations import ActivationBatch, ActivationStore, plan_activation_batches
from mismatch_probe.records.files import write_text
from mismatch_probe.records.sequences import TokenSequence

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
    side: PairSide
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


_BLOCK_NUMBERS: Final = 2
"""Stored numbers a token, layer and hidden unit."""
_HIDDEN_WIDE: Final = 18
_HEADS_WIDE: Final = 6
_FEED_FORWARD_WIDE: Final = 6
"""Of modules: how often a layer of vLLM, whose norms are given FP32 sums, stores what is as wide as this."""
_MOST_LOGITS: Final = 2**26


def max_stored_tokens(config: dict[str, Any], *, dtypes: tuple[Dtype, Dtype], modules: bool, most_bytes: int) -> int:
    """Tokens whose activations, both sides together, stay within `most_bytes` by the checkpoint's config."""
    text = config.get("text_config", config)
    numbers = _of_modules(text) if modules else _BLOCK_NUMBERS * text["hidden_size"]
    return int(most_bytes // (numbers * text["num_hidden_layers"] * sum(dtype.num_bytes for dtype in dtypes)))


def _of_modules(text: dict[str, Any]) -> int:
    """Stored numbers a token and layer; where the config does not say, heads are as wide as the stream in all."""
    hidden_size: int = text["hidden_size"]
    heads: int = text.get("num_attention_heads") or 1
    head_dim: int = text.get("head_dim") or hidden_size // heads
    num_heads = heads + (text.get("num_key_value_heads") or heads)
    feed_forward: int = text.get("intermediate_size") or 4 * hidden_size
    return _HIDDEN_WIDE * hidden_size + _HEADS_WIDE * num_heads * head_dim + _FEED_FORWARD_WIDE * feed_forward


def logit_rows(config: dict[str, Any]) -> int:
    """The number of positions at which all logits are compared: few, because a vocabulary is large."""
    return int(max(1, _MOST_LOGITS // config.get("text_config", config)["vocab_size"]))


def looked_into(sequences: Sequence[TokenSequence], max_tokens: int) -> list[TokenSequence]:
    """The first sequences that fit, one at least."""
    chosen_sequences: list[TokenSequence] = []
    room = max_tokens
    for sequence in sequences:
        if chosen_sequences and sequence.num_tokens > room:
            break
        chosen_sequences.append(sequence)
        room -= sequence.num_tokens
    return chosen_sequences


def activation_batches(sequences: Sequence[TokenSequence], task: JobInput) -> list[ActivationBatch]:
    return plan_activation_batches(
        looked_into(sequences, task.max_stored_tokens),
        batch_tokens=task.settings.training.batch_tokens,
        logit_rows=task.logit_rows,
    )
