"""What an objective is made of: advantage, ratio and clip, correction, normaliser. No torch, so settings load it.

The objectives by name, and what a user may change in one. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, Literal

from pydantic import Field

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import CorrectionName, Settings
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


_GRPO: Final = Objective(
    name="grpo",
    advantage="group-mean-std",
    ratio=RATIOS["token"],
    correction=CORRECTIONS["none"],
    normaliser="sequence",
    source="arXiv 2402.03300; clip of the code released with arXiv 2510.26788",
)

_POLICY_GRADIENT: Final = Objective(
    name="pg-seq-is",
    advantage="group-mean",
    ratio=RATIOS["none"],
    correction=CORRECTIONS["seq-is"],
    normaliser="constant-length",
    source="arXiv 2510.26788: the unbiased policy gradient of samples from mu",
)

OBJECTIVES: Final[dict[str, Objective]] = {
    objective.name: objective
    for objective in (
        Objective(
            name="reinforce",
            advantage="batch-mean",
            ratio=RATIOS["none"],
            correction=CORRECTIONS["none"],
            normaliser="constant-length",
            source="Williams 1992, Machine Learning 8:229, with a reinforcement baseline",
        ),
        _GRPO,
        Objective(
            name="dr-grpo",
            advantage="group-mean",
            ratio=Ratio("token", 0.2, 0.28),
            correction=CORRECTIONS["none"],
            normaliser="constant-length",
            source="arXiv 2503.20783; clip of the text of arXiv 2510.26788 (0.2 and 0.2 in its released code)",
        ),
        replace(
            _GRPO, name="grpo-token-tis", correction=CORRECTIONS["token-tis"], source="arXiv 2510.26788; verl, TRL"
        ),
        replace(_GRPO, name="grpo-seq-mis", correction=CORRECTIONS["seq-mis"], source="arXiv 2510.26788"),
        replace(_GRPO, name="gspo", ratio=RATIOS["sequence"], source="arXiv 2507.18071, section 5.1"),
        _POLICY_GRADIENT,
        replace(
            _POLICY_GRADIENT,
            name="pg-seq-tis",
            correction=CORRECTIONS["seq-tis"],
            source="arXiv 2510.26788; its scripts named seq_mis without a ratio truncate, which is this",
        ),
        replace(
            _POLICY_GRADIENT, name="pg-seq-mis", correction=CORRECTIONS["seq-mis"], source="arXiv 2510.26788, its text"
        ),
        Objective(
            name="ppo",
            advantage="gae",
            ratio=RATIOS["token"],
            correction=CORRECTIONS["none"],
            normaliser="token",
            source="arXiv 1707.06347; discount, lambda and value clip of verl",
            critic=CriticRule(),
        ),
    )
}


CLIPS: Final = ("clip_low", "clip_high", "dual_clip")
CRITIC_SETTINGS: Final = ("discount", "gae_lambda", "value_clip")


class Overrides(Settings):
    """What a user may change; what is None stays as the objective has it."""

    advantage: AdvantageRule | None = None
    ratio: RatioLevel | None = None
    correction: CorrectionName | None = None
    normaliser: Normaliser | None = None
    clip_low: float | None = Field(default=None, gt=0, le=1)
    clip_high: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    threshold: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    discount: float | None = Field(default=None, gt=0, le=1)
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    value_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)


def build_objective(name: str, overrides: Mapping[str, Any] | None = None) -> Objective:
    """The objective of that name, with `overrides` (fields of `Overrides`) in place of its defaults.

    Raises:
        UsageError: no such objective or setting, a value out of range, or a setting the objective has no use for.
    """
    if name not in OBJECTIVES:
        close_names = get_close_matches(name, OBJECTIVES, n=1, cutoff=0.4)
        suggestion = f"did you mean {close_names[0]!r}? " if close_names else ""
        raise UsageError(f"objective {name!r} is unknown; {suggestion}give --objective one of {', '.join(OBJECTIVES)}")
    declared_values = parse_settings(Overrides, overrides or {})
    base = OBJECTIVES[name]
    advantage = declared_values.advantage or base.advantage
    ratio = base.ratio if declared_values.ratio in (None, base.ratio.level) else RATIOS[declared_values.ratio]
    correction = CORRECTIONS[declared_values.correction] if declared_values.correction else base.correction
    critic = (base.critic or CriticRule()) if advantage == "gae" else None
    _refuse_unused(name, declared_values, CLIPS, ratio.level == "none", "its ratio is none")
    _refuse_unused(
        name, declared_values, ("threshold",), correction.threshold is None, "its correction has no threshold"
    )
    _refuse_unused(name, declared_values, CRITIC_SETTINGS, critic is None, "it has no critic")
    return replace(
        base,
        advantage=advantage,
        ratio=replace(ratio, **_set_values(declared_values, CLIPS)),
        correction=replace(correction, **_set_values(declared_values, ("threshold",))),
        normaliser=declared_values.normaliser or base.normaliser,
        critic=critic and replace(critic, **_set_values(declared_values, CRITIC_SETTINGS)),
    )


def _set_values(overrides: Overrides, names: tuple[str, ...]) -> dict[str, Any]:
    return overrides.model_dump(include=set(names), exclude_none=True)


def _refuse_unused(name: str, overrides: Overrides, settings: tuple[str, ...], is_unused: bool, reason: str) -> None:
    for setting in _set_values(overrides, settings) if is_unused else ():
        raise UsageError(f"objective {name} has no use for {setting}, because {reason}; leave {setting} out")
