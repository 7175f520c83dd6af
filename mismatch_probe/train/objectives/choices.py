"""What an objective is made of: advantage, ratio and clip, correction, normaliser. No torch, so settings load it."""

from dataclasses import dataclass
from typing import Final, Literal

from mismatch_probe.config.model import CorrectionName
from mismatch_probe.errors import UsageError

AdvantageRule = Literal["reward", "batch-mean", "group-mean", "group-mean-std", "leave-one-out", "gae"]
RatioLevel = Literal["none", "token", "sequence"]
Normaliser = Literal["token", "sequence", "constant-length"]

GROUP_RULES: Final[frozenset[AdvantageRule]] = frozenset({"group-mean", "group-mean-std", "leave-one-out"})


@dataclass(frozen=True)
class Ratio:
    """pi_new / pi_old of each token, or its geometric mean over the sequence, held in [1 - clip_low, 1 + clip_high].

    `none` is the plain policy gradient on log pi and has no clip. dual_clip: where the advantage is negative a ratio
    counts as this at the most; None where there is no such bound.
    """

    level: RatioLevel
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None


@dataclass(frozen=True)
class Correction:
    """What is done with w = pi_old / mu of a token or (the product) of a sequence.

    `weigh` multiplies by w; `truncate` by min(w, threshold); `mask` multiplies by w and rejects w > threshold or
    w < floor; `none` leaves the loss as it is.
    """

    level: Literal["token", "sequence"]
    action: Literal["none", "weigh", "truncate", "mask"]
    threshold: float | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class CriticRule:
    """Generalised advantage estimation and the range within which a value may move in one update."""

    discount: float = 1.0
    gae_lambda: float = 1.0
    value_clip: float = 0.5


@dataclass(frozen=True)
class Objective:
    """`source` says where the rule and its defaults come from; `critic` is set exactly where the advantage is `gae`."""

    name: str
    advantage: AdvantageRule
    ratio: Ratio
    correction: Correction
    normaliser: Normaliser
    source: str
    critic: CriticRule | None = None

    def __post_init__(self) -> None:
        assert (self.critic is not None) == (self.advantage == "gae")
        if self.advantage == "gae" and self.ratio.level == "sequence":
            raise UsageError(
                f"objective {self.name}: the advantage gae differs by token, and the ratio 'sequence' is one for all "
                "tokens; choose the ratio 'token' or 'none', or another advantage"
            )


def require_group(rule: AdvantageRule, samples: int) -> None:
    """
    Raises:
        UsageError: the rule compares the samples of a prompt, and there are fewer than two.
    """
    if rule in GROUP_RULES and samples < 2:
        raise UsageError(
            f"the advantage {rule} compares the samples of one prompt, and a prompt has only one; "
            "give --samples-per-prompt 2 or more (rollout.samples), or another advantage"
        )


THRESHOLD: Final = 3.0
"""C in the text of arXiv 2510.26788, and TRL's; its released code has 2 for tokens and 10 for sequences."""

RATIOS: Final[dict[RatioLevel, Ratio]] = {
    "none": Ratio("none"),
    "token": Ratio("token", 0.2, 0.2),
    "sequence": Ratio("sequence", 3e-4, 4e-4),
}

CORRECTIONS: Final[dict[CorrectionName, Correction]] = {
    "none": Correction("token", "none"),
    "token-tis": Correction("token", "truncate", THRESHOLD),
    "icepop": Correction("token", "mask", 5.0, floor=0.5),
    "seq-is": Correction("sequence", "weigh"),
    "seq-tis": Correction("sequence", "truncate", THRESHOLD),
    "seq-mis": Correction("sequence", "mask", THRESHOLD),
}
