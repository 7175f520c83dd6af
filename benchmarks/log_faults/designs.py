"""The models and sizes of the logs that faults are injected into."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.fault_lab.models import CHATS
from benchmarks.fault_lab.recording import CLEAN_DTYPES
from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.tasks import resolve_model
from tests.tiny_models import make_checkpoint


@dataclass(frozen=True)
class Design:
    """family: of a random tiny model, or the folder of a real one; None for the trained demo checkpoint. held_out: the
    rules of `explain` were not chosen on it. prompts, samples, tokens: how many prompts, responses to each, and tokens
    of each at most.
    """

    family: str | Path | None
    prompts: int
    samples: int
    tokens: int = 48
    source: str = "sums:terms=2-6"
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"init_std": 0.3}))
    dtypes: tuple[Dtype, ...] = CLEAN_DTYPES
    held_out: bool = False

    @property
    def size(self) -> str:
        return f"{self.prompts} prompts x {self.samples} of {self.tokens} tokens"

    def checkpoint(self, folder: Path) -> Path:
        """The model's folder, made on first use at `folder`."""
        if self.family is None:
            return resolve_model(ModelSettings(path="demo"))
        if isinstance(self.family, Path):
            return self.family
        return folder if folder.exists() else make_checkpoint(folder, self.family, **self.changes)


_BF16 = (Dtype.BF16,)
DESIGNS: Mapping[str, Design] = {
    "llama": Design("llama", 8, 8),
    "qwen3-moe": Design("qwen3-moe", 8, 8),
    "demo": Design(None, 16, 2, tokens=64, source="sums:medium"),
    "qwen3": Design("qwen3", 10, 4, changes={"init_std": 0.25, "seed": 11}),
    "qwen2": Design("qwen2", 6, 6, tokens=40, changes={"init_std": 0.25, "seed": 5}, held_out=True),
    "heavy-tails": Design("qwen2", 8, 4, changes={"init_std": 0.5, "seed": 23}, dtypes=_BF16, held_out=True),
    "two-prompts": Design("qwen3", 2, 10, changes={"init_std": 0.3, "seed": 31}, dtypes=_BF16),
    "one-prompt": Design("llama", 1, 16, changes={"init_std": 0.25, "seed": 41}, dtypes=_BF16, held_out=True),
    "four-responses": Design("qwen3", 4, 1, 96, changes={"init_std": 0.3, "seed": 53}, dtypes=_BF16),
}
"""Several samples of a prompt, as in training: contexts that occur again show whether a side agrees with itself. The
trained model, which is surer of its tokens, needs fewer.
"""


REAL = Design(None, 8, 2, 32, source=CHATS, dtypes=_BF16, held_out=True)


def design_of(model: str) -> Design:
    """Of a model that is listed, or of the folder of a real checkpoint, in BF16."""
    return DESIGNS.get(model) or replace(REAL, family=Path(model).resolve())
