"""What a side's own settings change: a pair beside the one that differs from it in those settings alone."""

from collections.abc import Sequence
from typing import Literal

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.sides import Side
from mismatch_probe.records.summary import PairSummary, SettingsToldApart
from mismatch_probe.stats.contrast import contrast

RATIOS = ("kl_k3", "abs_logprob_diff")


def settings_told_apart(
    settings: CompareSettings, pair: PairSummary, pairs: Sequence[PairSummary]
) -> SettingsToldApart | None:
    """The pair beside the nearest of `pairs` that shares one of its sides and whose other side has its dtype: one of
    dtypes, or one that stands before it.

    None where there is none, or where the pair's own sides are nothing but dtypes.
    """
    others = [other for number, other in enumerate(pairs) if other.is_of_dtypes or number < pairs.index(pair)]
    pairs_beside = [told_apart for other in others if (told_apart := _beside(settings, pair, other)) is not None]
    return min(
        pairs_beside,
        key=lambda told_apart: (settings.exact_counterpart(told_apart.beside) is None, len(told_apart.settings)),
        default=None,
    )


def _beside(settings: CompareSettings, pair: PairSummary, other: PairSummary) -> SettingsToldApart | None:
    if pair.train == other.train:
        return _told_apart(pair, other, "mu", settings.mu(pair.infer), settings.mu(other.infer))
    if pair.infer == other.infer:
        return _told_apart(pair, other, "pi", settings.pi(pair.train), settings.pi(other.train))
    return None


def _told_apart(
    pair: PairSummary, other: PairSummary, role: Literal["pi", "mu"], side: Side, beside: Side
) -> SettingsToldApart | None:
    settings = side.differs_from(beside)
    if side.dtype != beside.dtype or side.name == side.dtype or not settings:
        return None
    ratios = {
        name: ratio
        for name in RATIOS
        if name in pair.metrics
        and name in other.metrics
        and (ratio := contrast(pair.metrics[name], other.metrics[name])) is not None
    }
    return SettingsToldApart(beside=(other.train, other.infer), side=role, settings=settings, ratios=ratios)
