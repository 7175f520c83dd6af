"""What a side's own settings change: a pair beside the one that differs from it in those settings alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.records.summary import PairSummary, SettingsToldApart
from mismatch_probe.stats.contrast import contrast, paired_contrast
from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair

RATIOS: Final[dict[str, Callable[[Floats], Floats]]] = {"kl_k3": k3_terms, "abs_logprob_diff": np.abs}
"""Metrics that are means over tokens, and what of d they average."""


def settings_told_apart(
    settings: CompareSettings, pair: PairSummary, pairs: Sequence[PairSummary], data: Mapping[PairName, PairData]
) -> SettingsToldApart | None:
    """The pair beside the nearest of `pairs` that shares one of its sides and whose other side has its dtype: one of
    dtypes, or one that stands before it.

    Two training sides score the same responses, and their ratios are paired by token; two engines sample their own.
    None where there is none, or where the pair's own sides are nothing but dtypes.
    """
    others = [other for number, other in enumerate(pairs) if other.is_of_dtypes or number < pairs.index(pair)]
    pairs_beside = [told_apart for other in others if (told_apart := _beside(settings, pair, other, data)) is not None]
    return min(
        pairs_beside,
        key=lambda told_apart: (settings.exact_counterpart(told_apart.beside) is None, len(told_apart.settings)),
        default=None,
    )


def _beside(
    settings: CompareSettings, pair: PairSummary, other: PairSummary, data: Mapping[PairName, PairData]
) -> SettingsToldApart | None:
    if pair.train == other.train:
        ratios = {
            name: contrast(pair.metrics[name], other.metrics[name])
            for name in RATIOS
            if name in pair.metrics and name in other.metrics
        }
        return _told_apart(other, "mu", settings.mu(pair.infer), settings.mu(other.infer), ratios)
    if pair.infer == other.infer:
        paired = _paired(data[pair.train, pair.infer], data[other.train, other.infer], settings.confidence)
        return _told_apart(other, "pi", settings.pi(pair.train), settings.pi(other.train), paired)
    return None


def _told_apart(
    other: PairSummary,
    role: Literal["pi", "mu"],
    side: Side,
    beside: Side,
    ratios: Mapping[str, Estimate | None],
) -> SettingsToldApart | None:
    settings = side.differs_from(beside)
    if side.dtype != beside.dtype or side.name == side.dtype or not settings:
        return None
    had = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return SettingsToldApart(beside=(other.train, other.infer), side=role, settings=settings, ratios=had)


def _paired(first: PairData, second: PairData, level: float) -> dict[str, Estimate | None]:
    """The ratios on the responses that both pairs can use."""
    if first.pair is None or second.pair is None:
        return {}
    place = {row_id: row for row, row_id in enumerate(second.row_ids)}
    rows = [
        (row, place[row_id])
        for row, row_id in enumerate(first.row_ids)
        if row_id in place and first.is_complete(row) and second.is_complete(place[row_id])
    ]
    if not rows:
        return {}
    ours, theirs = (np.asarray(column) for column in zip(*rows, strict=True))
    shared = first.pair.sequences
    sequences = Sequences.of_lengths(shared.lengths[ours], shared.clusters[ours])
    our_diff, their_diff = _diff(first.pair, ours), _diff(second.pair, theirs)
    return {
        name: paired_contrast(sequences, values(our_diff), values(their_diff), level) for name, values in RATIOS.items()
    }


def _diff(pair: TokenPair, rows: Ints) -> Floats:
    """d of the responses in these rows, one after another."""
    by_response = np.split(pair.diff, pair.sequences.offsets[1:-1])
    return np.concatenate([by_response[row] for row in rows])
