"""A comparison of arrays: what was estimated, what it means, and how it looks on a screen and in a notebook."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any, Final

from rich.console import Console

from mismatch_probe.notation import ABSENT, write_estimate
from mismatch_probe.records.summary import PairSummary, Summary, Verdict
from mismatch_probe.report.names import HEADLINE_METRICS
from mismatch_probe.report.pairs import budget, few_tokens_sentences, size_sentence, table_footnote, tokens_left_out
from mismatch_probe.report.screen import print_advice, print_line, print_table
from mismatch_probe.report.view import Table
from mismatch_probe.stats.catalogue import metric_meaning
from mismatch_probe.stats.results import CorrectionResult, Estimate, LengthLaw

FRAME_HEIGHT: Final = 640


@dataclass(frozen=True)
class Comparison:
    """Two sides on the same tokens. Print it, show it in a notebook, or take its parts; every estimate carries its
    interval and its counts.
    """

    summary: Summary

    @property
    def pair(self) -> PairSummary:
        """Everything, as in `summary.json` of a run."""
        return self.summary.pairs[0]

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """`kl_k3`, `abs_logprob_diff` and the others, by their names in docs/metrics.md."""
        return self.pair.metrics

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Metrics that these arrays cannot give, and why."""
        return self.pair.metrics_unavailable

    @property
    def length(self) -> LengthLaw | None:
        """How the deviation grows with length."""
        return self.pair.length

    @property
    def length_budget(self) -> Estimate | None:
        """Tokens of a response until sequence-level importance weights keep an ESS of one half.

        Fitted, or by the closed form ln 2 / (2 KL) where no law could be.
        """
        law = self.pair.length
        return None if law is None else law.budget_tokens or law.budget_closed_form

    @property
    def corrections(self) -> list[CorrectionResult]:
        """What known importance corrections would leave of the sample."""
        return self.pair.corrections

    @property
    def verdict(self) -> Verdict:
        return self.pair.verdict

    def to_dict(self) -> dict[str, Any]:
        """Strict JSON values, as a pair of `summary.json`."""
        return self.pair.model_dump(mode="json")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        """The verdict, the main metrics, the length budget, and what to do."""
        console = Console(file=StringIO(), width=120, color_system=None, force_terminal=False)
        print_line(console, f"{self.verdict.kind}: {self.verdict.sentence}")
        print_line(console, f"\n{size_sentence(self.pair)}{tokens_left_out(self.pair.counts)}\n")
        print_table(console, self._table())
        print_line(console, "")
        print_line(console, f"length budget {budget(self.pair)}: {table_footnote(self.summary)}")
        for sentence in few_tokens_sentences(self.summary):
            print_line(console, sentence)
        print_advice(console, self.verdict.advice)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()

    def _table(self) -> Table:
        rows = []
        for name in HEADLINE_METRICS:
            if name in self.metrics:
                written = write_estimate(self.metrics[name])
                rows.append([name, written.value, written.interval or ABSENT, metric_meaning(name)])
        return Table(size_sentence(self.pair), ["metric", "value", "interval", "what it is"], rows)

    def __repr__(self) -> str:
        return f"Comparison({self.verdict.kind}, {size_sentence(self.pair)})"

    def _repr_html_(self) -> str:
        from mismatch_probe.report.rendering import render_arrays

        return framed(render_arrays(self.summary))


def framed(page: str) -> str:
    """A whole page in a notebook's output, where its style and its scripts reach nothing else."""
    return (
        f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{FRAME_HEIGHT}px;border:0" '
        'sandbox="allow-scripts" title="mismatch-probe"></iframe>'
    )
