"""What the sides of a log are declared to be, and what may be tried to explain them."""

from typing import Annotated, Literal

from pydantic import Field

from mismatch_probe.config.model import (
    Count,
    CountOrNone,
    DtypeField,
    ModelSettings,
    Settings,
    Temperature,
)
from mismatch_probe.dtypes import Dtype

LoggedSide = Literal["mu", "pi"]
TokenIds = Annotated[tuple[CountOrNone, ...], Field(strict=False)]


class DeclaredPolicy(Settings):
    """How one side of a log is said to have computed its log-probs.

    temperature: unset, what the log says of each response, and 1 where it says nothing. top_p, top_k, min_p: the log's
    probabilities are normalised over what they keep.
    """

    dtype: DtypeField = Dtype.BF16
    temperature: Temperature | None = None
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: CountOrNone = 0
    min_p: float = Field(default=0.0, ge=0, le=1)


class KnownWeights(Settings):
    """Weights that a side may have had instead: those of `version`, a checkpoint's folder or a LoRA adapter's."""

    version: str
    checkpoint: str | None = None
    adapter: str | None = None


class ExplainSettings(Settings):
    """A log's sides against one checkpoint, given as a folder.

    weights: other weights that are tried. headers: token ids that may stand before a prompt, such as another system
    prompt's; header_texts: the same as texts, which the checkpoint's tokenizer encodes. chat_template: whether headers
    are taken from the checkpoint's own template too.
    """

    model: ModelSettings
    mu: DeclaredPolicy = DeclaredPolicy()
    pi: DeclaredPolicy = DeclaredPolicy()
    weights: tuple[KnownWeights, ...] = Field(default=(), strict=False)
    headers: tuple[TokenIds, ...] = Field(default=(), strict=False)
    header_texts: tuple[str, ...] = Field(default=(), strict=False)
    chat_template: bool = True
    adapter: str | None = None
    device: str = "auto"
    device_map: str | None = None
    batch_tokens: Count = 16384
