"""What things are called and how they look: pairs, metrics, sides, verdicts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.records.summary import PairSummary, Verdict

SIGNS: Final[dict[str, str]] = {"clean": "✓", "precision": "≈", "undecided": "?", "bug": "✕", "broken": "!"}
"""A sign for each kind of verdict, so that none is told by colour alone."""


def verdict_words(verdict: Verdict) -> str:
    """`clean`, or `bug: label offset` where the code says more than the kind."""
    return verdict.kind if verdict.code == verdict.kind else f"{verdict.kind}: {verdict.code.replace('_', ' ')}"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


DETAILED_PAIRS = 3
"""A page of more pairs than this draws coarser maps, and has the numbers of curves for the first ones only."""
MORE_PAIRS_NOTE = (
    f"The numbers of curves stand here for the first {DETAILED_PAIRS} pairs; summary.json holds those of all."
)


@dataclass(frozen=True)
class PairStyle:
    """Colour says the inference side, dash and marker the training side, so no pair is told by colour alone."""

    color: str
    dash: tuple[float, ...]
    marker: str

    @property
    def group(self) -> str:
        """What is drawn in this style, for the page to hide and show together."""
        return "-".join([self.color, *(f"{length:g}" for length in self.dash), self.marker])


StyleOf = Callable[[PairSummary], PairStyle]
Line = tuple[tuple[float, ...], str]
"""Dash and marker."""

_DASHES: Final[tuple[tuple[float, ...], ...]] = ((), (6, 2), (1.5, 1.5), (6, 2, 1.5, 2))
_MARKERS: Final = "os^D"
_OF_DTYPES: Final[dict[Dtype, Line]] = dict(
    zip((Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.FP64), zip(_DASHES, _MARKERS, strict=True), strict=True)
)
_OF_OTHERS: Final[list[Line]] = [line for line in product(_DASHES, _MARKERS) if line not in _OF_DTYPES.values()]
OTHER_COLORS: Final = tuple(f"side-{number}" for number in range(1, 9))

KEY_MARKERS: Final[dict[str, str]] = {
    "o": "M19 2.8a3.2 3.2 0 1 1 0 6.4a3.2 3.2 0 1 1 0-6.4z",
    "s": "M16 3h6v6h-6z",
    "^": "M19 2.4l3.6 6.6h-7.2z",
    "D": "M19 2l4 4l-4 4l-4-4z",
}
"""The markers as SVG paths around (19, 6), for keys outside the drawings."""


def pair_styles(pairs: Sequence[PairSummary]) -> StyleOf:
    """The style of each of a page's pairs. Dtypes look alike on every page, sides with names of their own take what is
    left, in their order; no two pairs share colour and dash as far as colours and dashes reach.
    """
    named = dict.fromkeys(pair.infer for pair in pairs if pair.infer != pair.infer_dtype)
    colors = {name: OTHER_COLORS[number % len(OTHER_COLORS)] for number, name in enumerate(named)}
    dashes_of_dtypes = {_OF_DTYPES[pair.train_dtype][0] for pair in pairs if pair.train == pair.train_dtype}
    left = sorted(_OF_OTHERS, key=lambda line: line[0] in dashes_of_dtypes)
    named = dict.fromkeys(pair.train for pair in pairs if pair.train != pair.train_dtype)
    lines = {name: left[number % len(left)] for number, name in enumerate(named)}
    styles: dict[tuple[str, str], PairStyle] = {}
    for pair in pairs:
        color, line = colors.get(pair.infer, pair.infer_dtype), lines.get(pair.train, _OF_DTYPES[pair.train_dtype])
        styles[pair.train, pair.infer] = _untaken(color, line, list(styles.values()))
    return lambda pair: styles[pair.train, pair.infer]


def _untaken(color: str, line: Line, taken: Sequence[PairStyle]) -> PairStyle:
    """`line` in that colour, or another where a style of that colour and dash, or else that style, is taken."""
    styles = [PairStyle(color, *each) for each in (line, *_OF_DTYPES.values(), *_OF_OTHERS)]
    dashes = {style.dash for style in taken if style.color == color}
    return next(
        (style for style in styles if style.dash not in dashes),
        next((style for style in styles if style not in taken), styles[0]),
    )


def dtypes_style(train: Dtype, infer: Dtype) -> PairStyle:
    return PairStyle(infer, *_OF_DTYPES[train])


def pair_label(pair: PairSummary) -> str:
    """`BF16`, or `train FP32 / infer fp8kv` where the sides differ or have names of their own."""
    return sides_label(pair.train, pair.infer)


def pair_key(pair: PairSummary) -> str:
    """Part of an anchor: `train-fp16-infer-bf16`."""
    return f"train-{pair.train}-infer-{pair.infer}"


HEADLINE_METRICS = (
    "abs_logprob_diff",
    "abs_logprob_diff_p99",
    "abs_logprob_diff_max",
    "kl_k1",
    "kl_k3",
    "token_mult_prob_error",
    "prob_abs_diff",
    "is_ratio_mean_seq",
    "ess_seq",
    "bitwise_equal",
)
"""Shown at once, in this order and as far as present; every other metric is one click away."""

_AGGREGATES = {"max": "largest", "min": "smallest", "std": "standard deviation", "seq": "of whole responses"}


def metric_aggregate(name: str) -> str:
    """`99th percentile` for `..._p99`; `mean` where the name carries no aggregate."""
    quantile = re.search(r"_p(\d+)(?:_(\d+))?$", name)
    if quantile:
        return f"{'.'.join(filter(None, quantile.groups()))}th percentile"
    return _AGGREGATES.get(name.rsplit("_", 1)[-1], "mean")
