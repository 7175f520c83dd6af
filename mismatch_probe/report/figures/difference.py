"""Both runs of a difference in one figure: the deviation by position, and the ratio of every metric."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.answers import BinDifference, MetricDifference, PairDifference
from mismatch_probe.report.figures.canvas import (
    LEAST_SPAN,
    band,
    hover,
    hover_estimate,
    inert_text,
    limit_line,
    line,
    logarithmic,
    marks,
    panel,
    titles,
)
from mismatch_probe.report.names import PairStyle
from mismatch_probe.report.view import Drawing, Heading, Panel
from mismatch_probe.stats.catalogue import facts_of, metric_words
from mismatch_probe.stats.results import Estimate

FIRST: Final = PairStyle("truncate", (), "o")
SECOND: Final = PairStyle("mask", (6, 2), "s")
_RATIO: Final = PairStyle("fp16", (), "D")
_BAND_ALPHA = 0.2


def draw_bins(heading: Heading, bins: Sequence[BinDifference], names: tuple[str, str], x_label: str) -> Panel:
    """Mean abs(d) of both runs on two logarithmic axes, with intervals; `names` are those of the runs."""

    def on(figure: Drawing) -> None:
        titles(figure, x_label, "|d|, nats")
        values: list[float] = []
        for name, style, of in zip(names, (FIRST, SECOND), ("first", "second"), strict=True):
            estimates = [(bin_, getattr(bin_.abs_logprob_diff, of)) for bin_ in bins]
            positive = [(bin_, estimate) for bin_, estimate in estimates if estimate.value > 0]
            x = [_middle(bin_) for bin_, _ in positive]
            low, high = [each.low for _, each in positive], [each.high for _, each in positive]
            band(figure, x, low, high, style, _BAND_ALPHA)
            texts = [hover_estimate(name, f"tokens {bin_.tokens}", each, "nats") for bin_, each in positive]
            line(figure, x, [each.value for _, each in positive], style, texts)
            values += [each.value for _, each in positive]
        if figure.traces:
            logarithmic(figure, "x", [_middle(bin_) for bin_ in bins])
            logarithmic(figure, "y", values, LEAST_SPAN)

    return panel(heading, on)


def draw_ratios(heading: Heading, pair: PairDifference, metrics: Sequence[str]) -> Panel:
    """The second run over the first: one mark a metric, its interval, and a line where nothing changed."""
    ratios = [(name, metric, metric.ratio) for name in metrics if (metric := pair.metrics.get(name)) is not None]
    with_ratio = [(name, metric, ratio) for name, metric, ratio in ratios if ratio is not None]

    def on(figure: Drawing) -> None:
        if not with_ratio:
            return
        places = list(range(len(with_ratio)))
        marks(
            figure,
            places,
            [ratio.value for _, _, ratio in with_ratio],
            _RATIO,
            [_hover_of_metric(name, metric, ratio) for name, metric, ratio in with_ratio],
            low=[ratio.low for _, _, ratio in with_ratio],
            high=[ratio.high for _, _, ratio in with_ratio],
        )
        titles(figure, "", "second / first")
        figure.update_axis(
            "x", tickvals=places, ticktext=[inert_text(_short_name(name)) for name, _, _ in with_ratio], tickangle=-35
        )
        ends = [end for _, _, ratio in with_ratio for end in (ratio.low, ratio.value, ratio.high)]
        logarithmic(figure, "y", [*ends, 1.0], 1.5)
        limit_line(figure, 1.0, role="reject")

    return panel(heading, on)


def _short_name(name: str) -> str:
    """As few words as fit below a mark."""
    facts = facts_of(name)
    return metric_words(name) if facts is None or not facts.short else facts.short


def _hover_of_metric(name: str, metric: MetricDifference, ratio: Estimate) -> str:
    return hover(
        metric_words(name),
        f"first {write_estimate(metric.first)}",
        f"second {write_estimate(metric.second)}",
        f"second / first {write_estimate(ratio)}",
    )


def _middle(bin_: BinDifference) -> float:
    """In the middle of a logarithmic axis."""
    return float(((bin_.low + 1) * bin_.high) ** 0.5)
