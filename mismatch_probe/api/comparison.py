"""A comparison of arrays and a run directory in a notebook: what they say, their numbers, their page."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import numpy as np
import pyarrow as pa
from rich.console import Console

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.config.comparison import PairName
from mismatch_probe.errors import NameLookup, UsageError, did_you_mean
from mismatch_probe.notation import ABSENT, write_estimate
from mismatch_probe.reading import Unreadable, as_path
from mismatch_probe.records.files import COMPARISONS, TRAININGS, kind_of
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary, Summary, Verdict
from mismatch_probe.records.training_run import TrainingDirectory, TrainingManifest, TrainingSummary
from mismatch_probe.report.names import HEADLINE_METRICS, metric_aggregate
from mismatch_probe.report.pairs import budget, few_tokens_sentences, size_sentence, table_footnote, tokens_left_out
from mismatch_probe.report.screen import print_advice, print_line, print_table
from mismatch_probe.report.view import Column, Table
from mismatch_probe.stats.catalogue import metric_meaning
from mismatch_probe.stats.results import CorrectionResult, Estimate, LengthLaw
from mismatch_probe.stats.sequences import Array
from mismatch_probe.verdict.findings import with_findings

FRAME_HEIGHT: Final = 640
TEXT_WIDTH: Final = 120


@dataclass(frozen=True)
class Comparison:
    """Two sides on the same tokens. Print it, show it in a notebook, or take its parts; every estimate carries its
    interval and its counts.
    """

    summary: Summary

    @property
    def pair(self) -> PairSummary:
        """The summary of the pair, as in `summary.json` of a run."""
        return self.summary.pairs[0]

    @property
    def metrics(self) -> Mapping[str, Estimate]:
        """The metrics by their names in docs/metrics.md: `kl_k3`, `abs_logprob_diff` and others.

        Another name ends in a KeyError that says the nearest one, or why these arrays cannot give it.
        """
        return NameLookup(self.pair.metrics, reasons=self.unavailable)

    @property
    def unavailable(self) -> Mapping[str, str]:
        """The metrics that these arrays cannot give, with the reason."""
        return self.pair.metrics_unavailable

    @property
    def length(self) -> LengthLaw | None:
        """The law of the deviation against length."""
        return self.pair.length

    @property
    def length_budget(self) -> Estimate | None:
        """The length in tokens at which the ESS of sequence-level importance weights falls to one half.

        It is fitted, or by the closed form ln 2 / (2 KL) where nothing could be fitted; then the interval reaches down
        to where errors that are alike throughout a response would end it.
        """
        law = self.pair.length
        return None if law is None else law.budget

    @property
    def corrections(self) -> list[CorrectionResult]:
        """The effect of known importance corrections on the sample."""
        return self.pair.corrections

    @property
    def verdict(self) -> Verdict:
        return self.pair.verdict

    def to_dict(self) -> dict[str, Any]:
        """The pair as strict JSON values, as in `summary.json`."""
        return self.pair.model_dump(mode="json")

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        """The verdict, the main metrics, the length budget, and what to do, in lines of `TEXT_WIDTH` characters."""
        console = Console(file=StringIO(), width=TEXT_WIDTH, color_system=None, force_terminal=False)
        print_line(console, f"{self.verdict.kind}: {self.verdict.sentence}")
        for line in ("", f"{size_sentence(self.pair)}{tokens_left_out(self.pair.counts)}", ""):
            print_line(console, line)
        print_table(console, self._metrics_table())
        for line in ("", f"length budget {budget(self.pair)}", table_footnote(self.summary)):
            print_line(console, line)
        for sentence in few_tokens_sentences(self.summary):
            print_line(console, sentence)
        print_advice(console, self.verdict.advice)
        assert isinstance(console.file, StringIO)
        return "\n".join(map(_within_width, console.file.getvalue().rstrip().splitlines()))

    def _metrics_table(self) -> Table:
        columns: list[Column[str]] = [
            Column("metric", str),
            Column("value", lambda name: write_estimate(self.metrics[name]).value),
            Column("interval", lambda name: write_estimate(self.metrics[name]).interval or ABSENT),
            Column("what it is", _meaning),
        ]
        names = [name for name in HEADLINE_METRICS if name in self.metrics]
        return Table.of(size_sentence(self.pair), names, columns)

    def __repr__(self) -> str:
        return f"Comparison({self.verdict.kind}, {size_sentence(self.pair)})"

    def to_html(self) -> str:
        """The page of the comparison, with plotly.js in it: written to a file it needs no network."""
        from mismatch_probe.report.page import render_arrays

        return render_arrays(self.summary)

    def _repr_html_(self) -> str:
        from mismatch_probe.report.page import render_arrays
        from mismatch_probe.report.rendering import PlotlyJs

        return frame_page(render_arrays(self.summary, PlotlyJs.CDN))


def _meaning(name: str) -> str:
    """What a metric measures, and how its values are aggregated, where that is no mean."""
    aggregate = metric_aggregate(name)
    return (
        metric_meaning(name) if aggregate in ("mean", "of whole responses") else f"{metric_meaning(name)} ({aggregate})"
    )


def _within_width(line: str) -> str:
    """A sentence that is longer goes on below, as far to the right as it, or the last column of a table, began."""
    if len(line) <= TEXT_WIDTH:
        return line
    start = max((gap.end() for gap in re.finditer(r"(^ +| {2,})(?=\S)", line)), default=0)
    return fill(line, TEXT_WIDTH, subsequent_indent=" " * start, break_long_words=False, break_on_hyphens=False)


def frame_page(page: str) -> str:
    """A complete page in a notebook's output, where its style and its scripts affect nothing else.

    A page in a cell fetches plotly.js, which alone would take 1.7 MB of the notebook; its numbers need no network.
    """
    attribute = page.replace("&", "&amp;").replace("'", "&#39;")
    return (
        f"<iframe srcdoc='{attribute}' style=\"width:100%;height:{FRAME_HEIGHT}px;border:0\" "
        'sandbox="allow-scripts" title="mismatch-probe"></iframe>'
    )


Frame = Any
"""A pandas DataFrame where pandas is installed, else a pyarrow Table."""

_LEGS: Final = ("log_pi", "log_mu", "log_ref", "entropy_pi")


def open_run(path: str | Path) -> "ComparisonRun | TrainingRun":
    """A comparison, an evaluation, an imported log or a training run; nothing in its folder is changed.

    Raises:
        UsageError: there is no such run.
        BrokenRecord: its records cannot be read.
    """
    try:
        folder = as_path(path)
    except Unreadable as error:
        raise UsageError(f"open_run cannot open a run: {error}") from error
    kind = kind_of(folder)
    if kind in COMPARISONS:
        return ComparisonRun(RunDirectory(folder))
    if kind in TRAININGS:
        return TrainingRun(TrainingDirectory(folder))
    words = "holds no run" if kind is None else f"holds {kind.noun}"
    raise UsageError(f"{folder} {words}; give the folder of a comparison, an imported log or a training run")


class ComparisonRun:
    """Both sides on the same token ids. manifest: settings, versions, what each side really applied."""

    def __init__(self, directory: RunDirectory) -> None:
        self.path: Path = directory.path
        self.manifest: Manifest = directory.read_manifest()
        self.summary: Summary = with_findings(directory.read_summary(), Findings(directory.path).documents())
        self._reader = RunReader(directory, self.manifest)

    @property
    def verdict(self) -> Verdict:
        """Of the most serious pair."""
        return self.summary.verdict

    @property
    def pairs(self) -> dict[PairName, PairSummary]:
        """By the names of the training side and the engine's: metrics with intervals, length law, verdict."""
        return NameLookup({(pair.train, pair.infer): _with_lookup(pair) for pair in self.summary.pairs}, "pair")

    def tokens(self, pair: PairName | None = None) -> Frame:
        """A row for each token that was measured: `id` of its response, `prompt_id`, `position` in the response,
        `token_id`, `text`, `log_pi`, `log_mu`, `diff`, and `log_ref` and `entropy_pi` where recorded; nats.

        pair: one of `pairs`; the first unless given.
        """
        data = self._measured_data(pair)
        token_pair = data.pair
        assert token_pair is not None
        sequences = token_pair.sequences
        rollouts = data.rollouts.take(pa.array(data.rows))
        of_response = sequences.spread(np.arange(sequences.num_sequences))
        places = np.concatenate([data.measured_positions(row) for row in range(sequences.num_sequences)]).tolist()
        columns: dict[str, Any] = {
            "id": rollouts["id"].take(pa.array(of_response)),
            "prompt_id": rollouts["prompt_id"].take(pa.array(of_response)),
            "position": pa.array(places, pa.int32()),
            "token_id": _values_at_places(rollouts["token_ids"], of_response, places, pa.int32()),
            "text": _values_at_places(rollouts["token_texts"], of_response, places, pa.string()),
            **{name: leg for name in _LEGS if (leg := getattr(token_pair, name)) is not None},
            "diff": token_pair.diff,
        }
        return _frame(pa.table(columns))

    def sequences(self, pair: PairName | None = None) -> Frame:
        """A row for each response that was measured: `id`, `prompt_id`, `finish_reason`, `num_tokens`, `diff_sum` (S),
        `abs_diff_mean` and `abs_diff_max`; nats. S is null where a token lacks a log-prob.

        pair: as in `tokens`.
        """
        data = self._measured_data(pair)
        token_pair = data.pair
        assert token_pair is not None
        rollouts, sequences = data.rollouts.take(pa.array(data.rows)), token_pair.sequences
        columns = {
            "id": rollouts["id"],
            "prompt_id": rollouts["prompt_id"],
            "finish_reason": rollouts["finish_reason"],
            "num_tokens": sequences.lengths,
            "diff_sum": pa.array(
                token_pair.diff_sums, mask=None if sequences.complete is None else ~sequences.complete
            ),
            "abs_diff_mean": sequences.sum_by_sequence(token_pair.abs_diff) / sequences.lengths,
            "abs_diff_max": np.maximum.reduceat(token_pair.abs_diff, sequences.offsets[:-1]),
        }
        return _frame(pa.table(columns))

    def metrics(self) -> Frame:
        """A row for each metric of each pair: `train`, `infer`, `metric`, `value`, `low`, `high`, and its counts."""
        rows = [
            {"train": train, "infer": infer, "metric": name, **vars(estimate)}
            for (train, infer), summary in self.pairs.items()
            for name, estimate in summary.metrics.items()
        ]
        return _frame(pa.Table.from_pylist(rows))

    def __repr__(self) -> str:
        return f"ComparisonRun({str(self.path)!r}): {self.summary.headline}"

    def _repr_html_(self) -> str:
        from mismatch_probe.report.answers.compare import summary_of_run
        from mismatch_probe.report.page import Filed, render_cell

        findings = Filed.of(self.path)
        summary = summary_of_run(self.summary, self.path, findings.findings)
        return frame_page(render_cell(summary, self.manifest, findings))

    def _measured_data(self, pair: PairName | None) -> PairData:
        names = list(self.pairs)
        name = names[0] if pair is None else pair
        if not isinstance(name, tuple) or not all(isinstance(side, str) for side in name):
            raise UsageError(f"pair {name!r:.40} is no pair of names: give one of {', '.join(map(repr, names))}")
        if name not in names:
            hint = did_you_mean("/".join(name), map("/".join, names), f"; it has {', '.join(map('/'.join, names))}")
            raise UsageError(f"{self.path} has no pair {'/'.join(name)}{hint}")
        data = self._reader.pair(name)
        if data.pair is None:
            raise UsageError(f"the pair {'/'.join(name)} of {self.path} has no token that could be measured")
        return data


class TrainingRun:
    """A training run, finished or not."""

    def __init__(self, directory: TrainingDirectory) -> None:
        self.path: Path = directory.path
        self.manifest: TrainingManifest = directory.read_training_manifest()
        self._directory = directory

    @property
    def summary(self) -> TrainingSummary:
        """As `report --json` gives it."""
        from mismatch_probe.report.training.page import summarise_training

        return summarise_training(self._directory)

    def metrics(self) -> Frame:
        """A row a step, a column a metric (docs/train-metrics.md); what was no number is NaN."""
        rows = [{"step": step, **values} for step, values in self._directory.read_metrics()]
        names = dict.fromkeys(name for row in rows for name in row)
        return _frame(pa.table({name: [row.get(name) for row in rows] for name in names}))

    def events(self) -> Frame:
        """A row for each guard that fired: `step`, `guard`, `metric`, `value`, `threshold`, `actions`, `sentence`."""
        numbers = ("value", "threshold")
        events = self._directory.read_events()
        return _frame(
            pa.Table.from_pylist([{**event, **{name: float(event[name]) for name in numbers}} for event in events])
        )

    def __repr__(self) -> str:
        return f"TrainingRun({str(self.path)!r}): {self.manifest.outcome}"

    def _repr_html_(self) -> str:
        from mismatch_probe.report.rendering import PlotlyJs
        from mismatch_probe.report.training.page import read_runs, render_training

        return frame_page(render_training(read_runs([self._directory], self._directory.report_path), PlotlyJs.CDN))


def _with_lookup(pair: PairSummary) -> PairSummary:
    return pair.model_copy(update={"metrics": NameLookup(pair.metrics, reasons=pair.metrics_unavailable)})


def _values_at_places(column: pa.ChunkedArray, responses: Array, places: Sequence[int], kind: pa.DataType) -> pa.Array:
    """The value at a place of each response's list."""
    lists = column.to_pylist()
    return pa.array([lists[row][place] for row, place in zip(responses, places, strict=True)], kind)


def _frame(table: pa.Table) -> Frame:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return table
    return table.to_pandas()
