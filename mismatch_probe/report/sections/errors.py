"""How far each side is from the reference, what the error is made of, and decode against prefill."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from mismatch_probe.notation import ABSENT, write_count, write_estimate, write_number, write_share
from mismatch_probe.records.summary import PairSummary, Summary
from mismatch_probe.report.figures.canvas import SMALL, color, hover, panel, power_of_ten, titles
from mismatch_probe.report.names import DETAILED_PAIRS, PairStyle, pair_key, pair_label, pair_styles
from mismatch_probe.report.pairs import write_independent
from mismatch_probe.report.view import (
    Block,
    Cell,
    Column,
    Drawing,
    Figure,
    Heading,
    Note,
    Panel,
    Section,
    Table,
    absences,
    with_values,
)
from mismatch_probe.stats.results import Blame, ErrorHistogram
from mismatch_probe.verdict.rounding import noise_sentences

_COMPONENT_MEANINGS = {
    "pi_weight_cast": "training path: rounding the weights to the dtype",
    "pi_arithmetic": "training path: computing in the dtype",
    "mu_weight_cast": "inference engine: rounding the weights to the dtype",
    "mu_arithmetic": "inference engine: computing in the dtype",
    "mu_decode_vs_prefill": "inference engine: decoding token by token against one prefill of the same tokens",
    "mu_prefill": "inference engine: error of its prefill",
    "pi_vs_mu_prefill": "both sides in one forward pass: training path against the engine's prefill",
    "pi_again": "training path: the same responses alone, twice",
    "pi_other_batch": "training path: the same responses alone and in their batches",
    "mu_other_batch": "inference engine: the same responses alone and in their batches, by prefill",
    "mu_decoded_alone": "inference engine: the first tokens of the same responses decoded alone and among many",
    "mu_cached": "inference engine: the same responses without the prefix cache and behind it",
    "mu_siblings": "sampler: one token in responses to a prompt that are equal up to it",
    "pi_siblings": "trainer: one token in responses to a prompt that are equal up to it",
    "pi_other_attention": "training path: the same responses alone, with another implementation of attention",
}


def part_meaning(name: str) -> str:
    """A part of an error, or a floor, in words."""
    return _COMPONENT_MEANINGS.get(name, name.replace("_", " "))


Blamed = list[tuple[PairSummary, Blame]]
_TAIL_SHARE = 1e-3
_FILL_ALPHA = 0.35
_MOST_TICKS = 7
"""As many stand level in a drawing that shares its row with two."""


def errors(summary: Summary) -> Section | None:
    """Without a reference a log has its sides' own noise alone; None where that was not measured either."""
    histograms = [histogram for pair in summary.pairs for histogram in pair.errors]
    blocks: list[Block] = []
    if histograms:
        blocks.append(_histograms(summary.pairs, histograms))
    blames = [(pair, pair.blame) for pair in summary.pairs if pair.blame]
    if blames:
        blocks.append(_table_of_errors(blames))
    for title, of in (("What the errors are made of", "components"), ("The instrument's own floors", "floors")):
        table = _parts_table(title, blames, of)
        if table:
            blocks.append(table)
    if absent := absences([(pair_label(pair), blame.unavailable) for pair, blame in blames]):
        blocks.append(absent)
    has_reference = any(blame.rms_error_pi or blame.rms_error_mu for _, blame in blames)
    if not histograms and not has_reference and all(pair.is_logged for pair in summary.pairs):
        return _own_noise(blames)
    if not blocks:
        blocks.append(Note("No reference was scored, so the deviation cannot be split between the two sides."))
    return Section(
        "errors",
        "Which side errs: both against the reference",
        "e_pi = log pi - log ref and e_mu = log mu - log ref, with the reference computed in high precision on the "
        "same tokens; d = e_pi - e_mu.",
        blocks,
    )


def _own_noise(blames: Blamed) -> Section | None:
    """How far each side of a log is from itself."""
    table = _parts_table("Own noise of each side", blames, "floors")
    if table is None:
        return None
    sentences = [sentence for _, blame in blames for sentence in noise_sentences(blame)]
    return Section(
        "errors",
        "How far each side is from itself",
        "Responses to one prompt share their first tokens: one token behind the same tokens must have one log-prob.",
        [table, Note("What it says:", sentences)],
    )


def _histograms(pairs: list[PairSummary], histograms: list[ErrorHistogram]) -> Figure:
    limits = shared_limits(histograms)
    pairs_with_errors, style_of = [pair for pair in pairs if pair.errors], pair_styles(pairs)
    return Figure(
        "figure-errors",
        "How to read it: the filled shape is the training path (pi), the dashed outline the inference engine (mu); "
        f"one mark of the axis to the left is {_times_a_mark(limits)} more exact. Two shapes on one another mean both "
        "sides err alike; a gap means that one side computes in a coarser way. Exact agreement and bins below 0.1 % of "
        "the tokens are left out of the drawing and counted in the table.",
        [
            _histogram_panel(
                Heading(f"errors-{pair_key(pair)}", pair_label(pair), _rms_sentence(pair)),
                pair.errors,
                style_of(pair),
                limits,
            )
            for pair in pairs_with_errors
        ],
        [_counts(pair) for pair in pairs_with_errors[:DETAILED_PAIRS]],
        dense=True,
    )


def _counts(pair: PairSummary) -> Table:
    sides = {histogram.side: histogram for histogram in pair.errors}
    edges = sorted({edge for histogram in pair.errors for edge in histogram.edges_log10})
    counts = {
        side: dict(zip(histogram.edges_log10[:-1], histogram.counts, strict=True)) for side, histogram in sides.items()
    }
    columns: list[Column[tuple[float, float] | None]] = [
        Column("abs(error), nats", _bin_words),
        *Column.each(
            sides.values(),
            lambda histogram: histogram.side,
            lambda histogram, bin_: write_count(
                histogram.zeros if bin_ is None else counts[histogram.side].get(bin_[0], 0)
            ),
        ),
    ]
    bins = [bin_ for bin_ in pairwise(edges) if any(counts[side].get(bin_[0], 0) for side in sides)]
    return Table.of(f"{pair_label(pair)}: tokens by abs(error)", [None, *bins], columns)


def _bin_words(bin_: tuple[float, float] | None) -> str:
    return "0" if bin_ is None else f"{write_number(10 ** bin_[0])} to {write_number(10 ** bin_[1])}"


def _table_of_errors(blames: Blamed) -> Table:
    rows: list[tuple[str, Callable[[Blame], Cell]]] = [
        ("rms of e_pi", lambda blame: write_estimate(blame.rms_error_pi)),
        ("rms of e_mu", lambda blame: write_estimate(blame.rms_error_mu)),
        ("correlation of the two", lambda blame: write_estimate(blame.error_correlation)),
        ("rms of d", lambda blame: write_estimate(blame.rms_difference)),
        ("rms of d if they were independent", write_independent),
        ("pi's share of the mean squared error", lambda blame: write_estimate(blame.share_pi)),
    ]
    columns: list[Column[tuple[str, Callable[[Blame], Cell]]]] = [
        Column("", lambda row: row[0]),
        *Column.each(blames, lambda of: pair_label(of[0]), lambda of, row: row[1](of[1])),
    ]
    caption = "Root mean square errors against the reference, nats per token"
    return with_values(Table.of(caption, rows, columns, is_stacked=True))


def _parts_table(title: str, blames: Blamed, of: str) -> Table | None:
    parts = [getattr(blame, of) for _, blame in blames]
    names = list(dict.fromkeys(name for part in parts for name in part))
    if not names:
        return None
    columns: list[Column[str]] = [
        Column("contrast", lambda name: _COMPONENT_MEANINGS.get(name, name.replace("_", " "))),
        *Column.each(
            blames, lambda item: pair_label(item[0]), lambda item, name: write_estimate(getattr(item[1], of).get(name))
        ),
    ]
    return Table.of(f"{title}, rms in nats per token", names, columns, is_stacked=True)


def _rms_sentence(pair: PairSummary) -> str:
    if pair.blame is None:
        return f"rms errors: {ABSENT}"
    pi, mu = write_estimate(pair.blame.rms_error_pi), write_estimate(pair.blame.rms_error_mu)
    return f"rms error {pi} for pi and {mu} for mu"


def _histogram_panel(
    heading: Heading, histograms: Sequence[ErrorHistogram], style: PairStyle, limits: tuple[float, float]
) -> Panel:
    """pi filled, mu outlined, as shares of all tokens; all pairs of a page share the `limits` of log10 abs(error)."""

    def on(figure: Drawing) -> None:
        titles(figure, "abs(error), nats", "share of tokens")
        exponents = _marked_exponents(limits)
        figure.update_axis(
            "x",
            range=list(limits),
            tickvals=list(exponents),
            ticktext=[power_of_ten(10.0**exponent) for exponent in exponents],
        )
        figure.update_axis("y", rangemode="tozero")
        for histogram in histograms:
            _draw_histogram(figure, histogram, style)

    return panel(heading, on, SMALL)


def _marked_exponents(limits: tuple[float, float]) -> range:
    """Of ten, at the marks of the axis: each, or each second one and so on where there are too many."""
    exponents = range(math.ceil(limits[0]), math.floor(limits[1]) + 1)
    return exponents[:: math.ceil(len(exponents) / _MOST_TICKS) or 1]


def _times_a_mark(limits: tuple[float, float]) -> str:
    """`ten times`, or `100 times` where the axis marks each second power of ten."""
    step = _marked_exponents(limits).step
    return "ten times" if step == 1 else f"{write_count(10**step)} times"


def _draw_histogram(figure: Drawing, histogram: ErrorHistogram, style: PairStyle) -> None:
    total = sum(histogram.counts) + histogram.zeros
    is_pi = histogram.side == "pi"
    name = "training path (pi)" if is_pi else "inference engine (mu)"
    bins = list(zip(histogram.edges_log10[:-1], histogram.edges_log10[1:], histogram.counts, strict=True))
    texts = [
        hover(
            name,
            f"{write_number(10**start)} to {write_number(10**end)} nats",
            f"{write_share(count, total)} of the tokens",
        )
        for start, end, count in bins
    ]
    middles = [(start + end) / 2 for start, end, _ in bins]
    shares = [count / max(1, total) for _, _, count in bins]
    hover_fields = {"legendgroup": style.group, "hovertext": texts, "hoverinfo": "text"}
    if is_pi:
        widths = [end - start for start, end, _ in bins]
        figure.add_bar(
            x=middles, y=shares, width=widths, marker={"color": color(style.color)}, opacity=_FILL_ALPHA, **hover_fields
        )
    else:
        outline = {"shape": "hvh", "color": color("ink"), "width": 1.4, "dash": "4px,2px"}
        figure.add_scatter(x=middles, y=shares, mode="lines", line=outline, **hover_fields)


def shared_limits(histograms: Sequence[ErrorHistogram]) -> tuple[float, float]:
    """The range of log10 abs(error) over all histograms, without the tails that hold next to no tokens."""
    edges = [
        edge
        for histogram in histograms
        for start, end, count in zip(
            histogram.edges_log10[:-1], histogram.edges_log10[1:], histogram.counts, strict=True
        )
        if count > _TAIL_SHARE * sum(histogram.counts)
        for edge in (start, end)
    ]
    return (min(edges), max(edges)) if edges else (-8.0, 0.0)
