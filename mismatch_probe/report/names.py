"""What things are called and how they look: pairs, metrics, sides, verdicts; text of strangers as HTML.

Where to look when two sides disagree: where along the response, in which tokens and sequences, on which side.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from markupsafe import Markup, escape

from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.inert import SHORT_NAMES, cut_text, is_unseen, with_few_marks
from mismatch_probe.notation import write_estimate, write_number, write_range
from mismatch_probe.records.summary import PairSummary, TokenInContext, Verdict
from mismatch_probe.stats.results import CurveBin

PART_OF_CHARACTER: Final = "·"
"""What stands for a token without text: it holds the first bytes of a character that a later token completes."""
_MOST_CHARACTERS: Final = 4000


def visible_token(text: str, most_characters: int) -> Markup:
    """A token's text as `visible` shows it; `PART_OF_CHARACTER` for one without text."""
    return visible(cut_text(text, most_characters, keep="start") or PART_OF_CHARACTER)


def visible(text: str) -> Markup:
    """`text` as HTML: escaped, what cannot be seen shown as a small named box (`<i>`), and what is endless cut."""
    short = cut_text(text, _MOST_CHARACTERS, keep="start")
    if short.isascii() and short.isprintable():
        return escape(short)
    pieces: list[str] = []
    for character in with_few_marks(short):
        if is_unseen(character):
            pieces.append(f"<i>{SHORT_NAMES.get(character, f'U+{ord(character):04X}')}</i>")
        else:
            pieces.append(str(escape(character)))
    return Markup("".join(pieces))


ON_ONE_LINE: Final = re.compile(
    r"\d[\d.]*e-\d+|\d[\d.,]* %|[^\s<>&;]{1,24} \d[\d.,]{0,9}\.(?!\S)|(?<![\w-])--[a-z][\w.-]{0,39}(?![\w.-])", re.ASCII
)
"""A number, a share, a word and the number at the end of its sentence, a flag; no part of an entity, `&#39;`."""


def visible_sentence(text: str) -> Markup:
    """As `visible`, and no line ends inside a number or a flag, as it would behind the hyphens of `7.1e-5` and
    `--dtype`, or before `%`; nor does one begin with the `1.` that ends a sentence, which would read like an item.
    """
    return Markup(ON_ONE_LINE.sub(r'<span class="whole">\g<0></span>', str(visible(text))))


SIGNS: Final[dict[str, str]] = {
    "clean": "✓",
    "precision": "≈",
    "undecided": "?",
    "growing": "↗",
    "bug": "✕",
    "broken": "!",
}
"""A sign for each kind of verdict, and for a KL that grows over the steps of a log: colour alone marks none."""


def verdict_words(verdict: Verdict) -> str:
    """`clean`, or `bug: label offset` where the code says more than the kind; what is undecided is unexplained."""
    says_more = verdict.code != verdict.kind and (verdict.kind, verdict.code) != ("undecided", "unexplained")
    return f"{verdict.kind}: {verdict.code.replace('_', ' ')}" if says_more else verdict.kind


def advice_parts(advice: str) -> tuple[str, str]:
    """What to do, and the command that does it: what stands between backticks at the end, or nothing."""
    what, _, command = advice.partition(": `")
    return (what, command.removesuffix("`")) if command.endswith("`") else (advice, "")


DETAILED_PAIRS = 3
"""A page of more pairs than this draws coarser maps, and has the numbers of curves for the first ones only."""
MORE_PAIRS_NOTE = (
    f"The numbers of curves stand here for the first {DETAILED_PAIRS} pairs; summary.json holds those of all."
)


@dataclass(frozen=True)
class PairStyle:
    """Colour says the inference side, dash and marker the training side, so no pair is recognised by colour alone."""

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
_DISTINCT: Final[list[Line]] = list(zip(_DASHES, _MARKERS, strict=True))
_LINES: Final = [*_DISTINCT, *(line for line in product(_DASHES, _MARKERS) if line not in _DISTINCT)]
_OF_DTYPES: Final[dict[Dtype, Line]] = dict(zip(reversed(Dtype), _LINES, strict=False))
"""Every format has a line of its own, and a colour `--fig-FORMAT` in `templates/report.css`."""
_OF_OTHERS: Final = _LINES[len(_OF_DTYPES) :]
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
    names = dict.fromkeys(pair.infer for pair in pairs if pair.infer != pair.infer_dtype)
    colors = {name: OTHER_COLORS[number % len(OTHER_COLORS)] for number, name in enumerate(names)}
    dashes_of_dtypes = {_OF_DTYPES[pair.train_dtype][0] for pair in pairs if pair.train == pair.train_dtype}
    free_lines = sorted(_OF_OTHERS, key=lambda line: line[0] in dashes_of_dtypes)
    names = dict.fromkeys(pair.train for pair in pairs if pair.train != pair.train_dtype)
    lines = {name: free_lines[number % len(free_lines)] for number, name in enumerate(names)}
    styles: dict[tuple[str, str], PairStyle] = {}
    for pair in pairs:
        color, line = colors.get(pair.infer, pair.infer_dtype), lines.get(pair.train, _OF_DTYPES[pair.train_dtype])
        styles[pair.train, pair.infer] = _untaken(color, line, list(styles.values()))
    return lambda pair: styles[pair.train, pair.infer]


def _untaken(color: str, line: Line, styles_in_use: Sequence[PairStyle]) -> PairStyle:
    """`line` in that colour, or another where a style of that colour and dash, or else that style, is taken."""
    styles = [PairStyle(color, *each) for each in (line, *_OF_DTYPES.values(), *_OF_OTHERS)]
    dashes = {style.dash for style in styles_in_use if style.color == color}
    return next(
        (style for style in styles if style.dash not in dashes),
        next((style for style in styles if style not in styles_in_use), styles[0]),
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
    "pareto_k_seq",
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


_STANDS_OUT = 2.0
_FAR_BELOW = 4.0
_MAX_TOKENS_NAMED = 3
_TOKEN_CHARACTERS = 40


def where_to_look(pair: PairSummary) -> list[Markup]:
    """Sentences in HTML, model output in them inert; empty where the record has nothing to point at."""
    sentences = [_along_the_response(pair), _on_which_side(pair), _in_which_tokens(pair), _in_which_sequences(pair)]
    return [lead for lead in sentences if lead]


def _along_the_response(pair: PairSummary) -> Markup:
    bins = pair.length.abs_diff_by_position if pair.length else []
    overall = pair.metrics.get("abs_logprob_diff")
    if len(bins) < 2 or overall is None:
        return Markup()
    worst, least = (choose(bins, key=lambda bin_: bin_.mean.value) for choose in (max, min))
    if worst.mean.value < _STANDS_OUT * overall.value and least.mean.value < overall.value / _FAR_BELOW:
        shape = (
            f"mean |d| is {write_estimate(least.mean)} at {_tokens(least)}, against {write_estimate(overall)} over all "
            "tokens: it is far smaller there"
        )
    elif worst.mean.value < _STANDS_OUT * overall.value:
        shape = "the deviation is even: no stretch of the response stands out"
    else:
        place = (
            "it starts there and decays"
            if worst is bins[0]
            else "it grows towards the end"
            if worst is bins[-1]
            else "it peaks there"
        )
        shape = (
            f"mean |d| is {write_estimate(worst.mean)} at {_tokens(worst)}, "
            f"against {write_estimate(overall)} over all tokens; {place}"
        )
    return Markup('<a href="#length">Along the response</a>: {}.').format(shape)


def _on_which_side(pair: PairSummary) -> Markup:
    if pair.blame is None or pair.blame.rms_error_pi is None or pair.blame.rms_error_mu is None:
        return Markup()
    pi, mu = pair.blame.rms_error_pi, pair.blame.rms_error_mu
    larger, smaller = max(pi.value, mu.value), min(pi.value, mu.value)
    if larger < _STANDS_OUT * smaller:
        which = "both sides err alike"
    else:
        which = "the training path (pi) errs more" if pi.value > mu.value else "the engine (mu) errs more"
    return Markup('<a href="#errors">Which side</a>: {}: rms error {} for pi, {} for mu.').format(
        which, write_estimate(pi), write_estimate(mu)
    )


def _in_which_tokens(pair: PairSummary) -> Markup:
    if not pair.worst_tokens:
        return Markup()
    links = [
        Markup('<code class="token">{}</code> (token {}, d {})').format(
            visible_token(token.token, _TOKEN_CHARACTERS),
            token.position + 1,
            write_number(_d(token)),
        )
        for token in pair.worst_tokens[:_MAX_TOKENS_NAMED]
    ]
    return Markup('<a href="#worst-{}">Which tokens</a>: ').format(pair_key(pair)) + Markup(", ").join(links) + "."


def _in_which_sequences(pair: PairSummary) -> Markup:
    owners = Counter(token.sequence_id for token in pair.worst_tokens)
    if not owners:
        return Markup()
    sequence_id, most = owners.most_common(1)[0]
    if len(owners) > 1 and most == 1:
        text = Markup("no two of the {} worst tokens lie in one response").format(len(pair.worst_tokens))
    else:
        text = Markup("{} of the {} worst tokens lie in <code>{}</code>").format(
            most, len(pair.worst_tokens), visible(cut_text(sequence_id, _TOKEN_CHARACTERS, keep="start"))
        )
    return Markup('<a href="#worst-{}">Which responses</a>: {}.').format(pair_key(pair), text)


def _tokens(curve_bin: CurveBin) -> str:
    return f"token{'s' if curve_bin.high - curve_bin.low > 1 else ''} {write_range(curve_bin)}"


def _d(token: TokenInContext) -> float:
    return token.log_pi - token.log_mu
