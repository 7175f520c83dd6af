"""A side: one policy as it is computed. It alone makes the names of stages, legs, samplers and rows.

No other module spells these names or splits them. A side of which only the dtype is declared is called by it, so
`infer-bf16-decode` is what the engine in BF16 decoded.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from mismatch_probe.config.model import (
    Attention,
    Count,
    DtypeField,
    EngineSettings,
    ModelSettings,
    Precision,
    Settings,
    TrainingPathSettings,
)
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError

Role = Literal["mu", "pi", "ref"]

LOG_SIDE: Final = "log"
"""The name of the sides whose numbers a log gives."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,47}")
_ROLE_IN_NAMES: Final[dict[Role, str]] = {"mu": "infer", "pi": "train", "ref": "ref"}


def _as_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            "a side's name is at most 48 letters, digits, dots, hyphens, plus signs and underscores, and begins with a "
            "letter or digit"
        )
    with suppress(UsageError):
        return Dtype.parse(text).value
    return text


SideName = Annotated[str, AfterValidator(_as_name)]


NonemptyText = Annotated[str, Field(min_length=1)]


def _as_address(text: str) -> str:
    """A server's address in one spelling; what is no such address, or holds a secret, is not repeated."""
    try:
        address = urlsplit(text)
        port = address.port
    except ValueError as error:
        raise ValueError("it is no address; give http://HOST:PORT") from error
    if address.username is not None or address.password is not None or address.query or address.fragment:
        raise ValueError(
            "a server's address is http://HOST:PORT and a path at most: a run records it, so a key belongs into the "
            "environment"
        )
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError("a server's address begins with http:// or https:// and a host; give http://HOST:PORT")
    host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
    return f"{address.scheme}://{host}{'' if port is None else f':{port}'}{address.path.rstrip('/')}"


Address = Annotated[str, AfterValidator(_as_address)]


class DeclaredSide(Settings):
    """A side as a user declares it; what is left out is as in the run's own settings."""

    name: SideName
    dtype: DtypeField
    checkpoint: NonemptyText | None = None
    """A folder or hub id of its own, for instance last week's weights."""
    adapter: NonemptyText | None = None
    """The folder of a LoRA adapter."""
    logged: bool = False
    """Whether its numbers are those of an imported log, and nothing is computed for it."""


class InferSide(DeclaredSide):
    """An engine's side. A field that `EngineSettings` has too takes the place of the run's own."""

    url: Address | None = None
    """Of a server that samples instead of an engine in this process."""
    prefix_caching: bool | None = None
    prefill: bool | None = None
    """Unset, as the run's engine does; a server does not, since prompt log-probs can end it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Added to the run's engine arguments, in whose place they count; of a server, what it is asked with."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_server(cls, values: Any) -> Any:
        """Servers rarely say their dtype, and vLLM and SGLang serve most checkpoints in BF16."""
        if isinstance(values, dict) and values.get("url") is not None:
            return {"dtype": Dtype.BF16, **values}
        return values

    def merge_into(self, engine: EngineSettings) -> EngineSettings:
        """The run's engine settings with this side's own; of a server, only what it is asked with."""
        of_both = set(InferSide.model_fields) & set(EngineSettings.model_fields) - {"name", "args"}
        own = self.model_dump(include=of_both, exclude_none=True)
        if self.url is None:
            return engine.model_copy(update={"args": engine.args | self.args, **own})
        of_server = {"prefix_caching": True, "prefill": False, "adapter": engine.adapter, **own}
        return EngineSettings(
            name="server", batch_sequences=engine.batch_sequences, args={"url": self.url, **self.args}, **of_server
        )


class TrainSide(DeclaredSide):
    """A side of the training path."""

    precision: Precision | None = None
    attention: Attention | None = None
    log_softmax_dtype: DtypeField | None = None
    lm_head_dtype: DtypeField | None = None
    adapter_merged: bool | None = None
    ranks: Count | None = None
    tensor_parallel: Count | None = None

    def merge_into(self, training: TrainingPathSettings) -> TrainingPathSettings:
        """The run's settings of the training path with this side's own.

        The run's number of ranks holds where this side's tensor_parallel divides it; else as many hold it as that says.

        Raises:
            ValueError: they do not go together.
        """
        own = self.model_dump(exclude={"name", "dtype", "checkpoint", "logged"}, exclude_none=True)
        if self.ranks is None and self.tensor_parallel and (training.ranks or 0) % self.tensor_parallel:
            own["ranks"] = None
        return TrainingPathSettings.model_validate(training.model_dump() | own)


@dataclass(frozen=True)
class Side:
    """A policy and how it is computed."""

    name: str
    role: Role
    dtype: Dtype
    model: ModelSettings
    """The checkpoint that it loads."""
    engine: EngineSettings | None = None
    """How mu is computed."""
    training: TrainingPathSettings | None = None
    """How pi and the reference are computed."""
    rounded_to: Dtype | None = None
    """The dtype that the reference's weights are rounded to."""
    logged: bool = False
    """Whether its numbers come from a log."""

    @property
    def adapter(self) -> str | None:
        """The folder of the LoRA adapter that it computes with."""
        settings = self.engine or self.training
        return None if settings is None else settings.adapter

    @property
    def num_ranks(self) -> int:
        """How many processes of this command's hold its model over ranks; 0 where none or one holds it all."""
        settings = self.training or self.engine
        return 0 if settings is None else settings.num_ranks or 0

    @property
    def is_computed_here(self) -> bool:
        """Whether a process of this run computes it, which can be asked for whole distributions and experts."""
        return not (self.logged or (self.engine is not None and self.engine.is_remote))

    @property
    def sampler(self) -> str:
        """What stands behind the `@` of the rows that it samples."""
        return f"{_ROLE_IN_NAMES[self.role]}-{self.name}"

    @property
    def job(self) -> str:
        """The child process that holds its engine."""
        return f"engine-{self.name}"

    def leg(self, kind: str = "") -> str:
        """The leg of a kind: `decode` and `prefill` of mu, none of pi and the reference, and the floors' kinds."""
        return f"{self.sampler}-{kind}" if kind else self.sampler

    def full_vocabulary_leg(self, mu: "Side") -> str:
        """The leg of pi's whole distributions against those of mu."""
        return f"full-{self.name}-{mu.name}"

    def stage(self, what: str, kind: str = "") -> str:
        """The stage of this side that does something: `sample`, `replay`, `distributions` of mu, `score` of a leg."""
        return f"{what}-{self.name}" if self.role == "mu" and not kind else f"{what}-{self.leg(kind)}"

    def row_id(self, prompt_id: str, sample: int) -> str:
        """The id of a response that it samples."""
        return self.row_of(f"{prompt_id}/{sample}")

    def row_of(self, response: str) -> str:
        """The id that a response (`response_of`) has as this side's."""
        return f"{response}@{self.sampler}"

    def has_weights_of(self, other: "Side") -> bool:
        """Whether both load the same checkpoint and adapter."""
        return (self.model, self.adapter) == (other.model, other.adapter)

    def with_attention(self, attention: Attention) -> "Side":
        assert self.training is not None
        return replace(self, training=self.training.model_copy(update={"attention": attention}))

    def differs_from(self, other: "Side") -> list[str]:
        """Settings, besides name and dtype, that are others than `other`'s, each as `name = value`.

        How many ranks hold a model does not count: it changes no arithmetic.
        """
        mine, theirs = self._settings_to_compare(), other._settings_to_compare()
        is_remote = self.engine is not None and self.engine.is_remote
        more = () if is_remote else (key for key in theirs if key not in mine)
        return [f"{key} = {mine.get(key)}" for key in (*mine, *more) if mine.get(key) != theirs.get(key)]

    def _settings_to_compare(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"checkpoint": self.model.path}
        if self.training is not None:
            settings |= self.training.model_dump(mode="json", exclude={"ranks"})
        if self.engine is not None and self.engine.is_remote:
            settings |= {"adapter": self.engine.adapter, "url": self.engine.args["url"]}
        elif self.engine is not None:
            settings |= self.engine.model_dump(mode="json", exclude={"args"}) | self.engine.args
        return settings


def sampler_of(row_id: str) -> str:
    """Which side sampled a response."""
    return row_id.rpartition("@")[2]


def response_of(row_id: str) -> str:
    """Prompt and number of a response, whichever side sampled it."""
    return row_id.rpartition("@")[0]
