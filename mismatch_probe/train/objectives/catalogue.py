"""The objectives by name, and what a user may change in one. No torch."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final

from pydantic import Field

from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import CorrectionName, Settings
from mismatch_probe.errors import UsageError
from mismatch_probe.train.objectives.choices import (
    CORRECTIONS,
    RATIOS,
    AdvantageRule,
    CriticRule,
    Normaliser,
    Objective,
    Ratio,
    RatioLevel,
)

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
        near = get_close_matches(name, OBJECTIVES, n=1, cutoff=0.4)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"objective {name!r} is unknown; {meant}give --objective one of {', '.join(OBJECTIVES)}")
    given = parse_settings(Overrides, overrides or {})
    base = OBJECTIVES[name]
    advantage = given.advantage or base.advantage
    ratio = base.ratio if given.ratio in (None, base.ratio.level) else RATIOS[given.ratio]
    correction = CORRECTIONS[given.correction] if given.correction else base.correction
    critic = (base.critic or CriticRule()) if advantage == "gae" else None
    _refuse_unused(name, given, CLIPS, ratio.level == "none", "its ratio is none")
    _refuse_unused(name, given, ("threshold",), correction.threshold is None, "its correction has no threshold")
    _refuse_unused(name, given, CRITIC_SETTINGS, critic is None, "it has no critic")
    return replace(
        base,
        advantage=advantage,
        ratio=replace(ratio, **_given(given, CLIPS)),
        correction=replace(correction, **_given(given, ("threshold",))),
        normaliser=given.normaliser or base.normaliser,
        critic=critic and replace(critic, **_given(given, CRITIC_SETTINGS)),
    )


def _given(overrides: Overrides, names: tuple[str, ...]) -> dict[str, Any]:
    return overrides.model_dump(include=set(names), exclude_none=True)


def _refuse_unused(name: str, overrides: Overrides, settings: tuple[str, ...], is_unused: bool, reason: str) -> None:
    for setting in _given(overrides, settings) if is_unused else ():
        raise UsageError(f"objective {name} has no use for {setting}, because {reason}; leave {setting} out")
