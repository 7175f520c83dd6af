"""The stages of a comparison: what each computes for a side, and which leg it writes."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from mismatch_probe.config.model import Attention
from mismatch_probe.config.sides import Side


@dataclass(frozen=True)
class _OneLegStage:
    """What writes one leg of a side. `work` and `leaves` name the stage and its leg as the side spells them."""

    work: ClassVar[str]
    leaves: ClassVar[str] = ""

    side: Side

    @property
    def name(self) -> str:
        return self.side.stage(self.work)

    @property
    def leg(self) -> str:
        return self.side.leg(self.leaves)

    @property
    def model(self) -> Side:
        """What the training path loads for it."""
        return self.side

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class SampleStage(_OneLegStage):
    """mu samples responses and reports the log-probs it decoded with."""

    work, leaves = "sample", "decode"

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("rollouts", self.leg)


@dataclass(frozen=True)
class ReplayStage(_OneLegStage):
    """mu scores its own responses again by prefill."""

    work, leaves = "replay", "prefill"


EngineChange = Literal["alone", "cached"]


@dataclass(frozen=True)
class EngineFloorStage(_OneLegStage):
    """mu scores a few of its responses by prefill again: each `alone`, or alone behind what the prefix cache holds."""

    change: EngineChange

    @property
    def name(self) -> str:
        return self.side.stage("replay", self.change)

    @property
    def leg(self) -> str:
        return self.side.leg(self.change)


@dataclass(frozen=True)
class DecodeAloneStage(_OneLegStage):
    """mu samples the beginnings of a few of its responses again, each alone."""

    leaves = "decoded-alone"

    @property
    def name(self) -> str:
        return self.side.stage("sample", "alone")


@dataclass(frozen=True)
class EngineRoutingStage(_OneLegStage):
    """mu's choice of experts on a few of its responses, by prefill."""

    work = leaves = "routing"


@dataclass(frozen=True)
class DistributionsStage:
    """mu's whole next-token distributions at some positions: parts only, for the training path to compare its own."""

    side: Side

    @property
    def name(self) -> str:
        return self.side.stage("distributions")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("distributions",)


@dataclass(frozen=True)
class ScoreStage(_OneLegStage):
    """The training path scores the responses of `samplers`: pi, or the reference on weights as given or rounded."""

    work = "score"

    samplers: tuple[str, ...]


FloorChange = Literal["alone", "again", "other-attention"]


@dataclass(frozen=True)
class FloorStage(_OneLegStage):
    """pi scores a few responses of each sampler one by one: `alone`, the same `again`, or with other attention."""

    samplers: tuple[str, ...]
    change: FloorChange

    @property
    def name(self) -> str:
        return self.side.stage("score", self.change)

    @property
    def leg(self) -> str:
        return self.side.leg(self.change)

    @property
    def model(self) -> Side:
        return self.side if self.attention is None else self.side.with_attention(self.attention)

    @property
    def attention(self) -> Attention | None:
        """Another than the side's own, None for that."""
        assert self.side.training is not None
        return _OTHER_ATTENTION[self.side.training.attention] if self.change == "other-attention" else None


@dataclass(frozen=True)
class RoutingStage(_OneLegStage):
    """pi's choice of experts on the few responses of each engine whose own choice is recorded."""

    work = leaves = "routing"

    engines: tuple[Side, ...]

    @property
    def samplers(self) -> tuple[str, ...]:
        return tuple(mu.sampler for mu in self.engines)


@dataclass(frozen=True)
class FullVocabularyStage(_OneLegStage):
    """pi's whole distributions against mu's; what is recorded is reduced to numbers a position."""

    mu: Side

    @property
    def name(self) -> str:
        return f"compare-{self.leg}"

    @property
    def leg(self) -> str:
        return self.side.full_vocabulary_leg(self.mu)

    @property
    def samplers(self) -> tuple[str, ...]:
        return (self.mu.sampler,)


TrainingStage = ScoreStage | FloorStage | RoutingStage | FullVocabularyStage
LegStage = SampleStage | ReplayStage | EngineFloorStage | DecodeAloneStage | EngineRoutingStage | TrainingStage
Stage = LegStage | DistributionsStage

_OTHER_ATTENTION: Final[dict[Attention | None, Attention]] = {
    None: "eager",
    "sdpa": "eager",
    "eager": "sdpa",
    "flash_attention_2": "sdpa",
}
"""SDPA and eager check each other; flash attention, which runs in 16 bit alone, is held against SDPA."""
