"""The stages of a comparison: what each computes for a side, and which leg it writes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal

from mismatch_probe.config.model import Attention
from mismatch_probe.config.sides import Side


@dataclass(frozen=True)
class _OneLegStage(ABC):
    """What writes one leg of a side; `model` is what the training path loads for it."""

    side: Side

    @property
    @abstractmethod
    def leg(self) -> str: ...

    @property
    def model(self) -> Side:
        return self.side

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.leg,)


@dataclass(frozen=True)
class SampleStage(_OneLegStage):
    """mu samples responses and reports the log-probs it decoded with."""

    @property
    def name(self) -> str:
        return self.side.stage("sample")

    @property
    def leg(self) -> str:
        return self.side.leg("decode")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("rollouts", self.leg)


@dataclass(frozen=True)
class ReplayStage(_OneLegStage):
    """mu scores its own responses again by prefill."""

    @property
    def name(self) -> str:
        return self.side.stage("replay")

    @property
    def leg(self) -> str:
        return self.side.leg("prefill")


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

    @property
    def name(self) -> str:
        return self.side.stage("sample", "alone")

    @property
    def leg(self) -> str:
        return self.side.leg("decoded-alone")


@dataclass(frozen=True)
class EngineRoutingStage(_OneLegStage):
    """mu's choice of experts on a few of its responses, by prefill."""

    @property
    def name(self) -> str:
        return self.side.stage("routing")

    @property
    def leg(self) -> str:
        return self.side.leg("routing")


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

    samplers: tuple[str, ...]

    @property
    def leg(self) -> str:
        return self.side.leg()

    @property
    def name(self) -> str:
        return self.side.stage("score")


FloorChange = Literal["alone", "again", "other-attention"]


@dataclass(frozen=True)
class FloorStage(_OneLegStage):
    """pi scores a few responses of each sampler one by one: `alone`, the same `again`, or with other attention."""

    samplers: tuple[str, ...]
    change: FloorChange

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

    @property
    def name(self) -> str:
        return self.side.stage("score", self.change)


@dataclass(frozen=True)
class RoutingStage(_OneLegStage):
    """pi's choice of experts on the few responses of each engine whose own choice is recorded."""

    engines: tuple[Side, ...]

    @property
    def leg(self) -> str:
        return self.side.leg("routing")

    @property
    def samplers(self) -> tuple[str, ...]:
        return tuple(mu.sampler for mu in self.engines)

    @property
    def name(self) -> str:
        return self.side.stage("routing")


@dataclass(frozen=True)
class FullVocabularyStage(_OneLegStage):
    """pi's whole distributions against mu's; what is recorded is reduced to numbers a position."""

    mu: Side

    @property
    def leg(self) -> str:
        return self.side.full_vocabulary_leg(self.mu)

    @property
    def samplers(self) -> tuple[str, ...]:
        return (self.mu.sampler,)

    @property
    def name(self) -> str:
        return f"compare-{self.leg}"


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
