"""`report.html`: one file, from the records of a run and what other commands recorded with it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.evaluation import Evaluation, EvaluationDirectory
from mismatch_probe.records.findings import Document, Findings, file_name
from mismatch_probe.records.gate_result import GATE_FILE, GateResult, answer_of
from mismatch_probe.records.kinds import EVALUATION
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.evaluation import evaluation_overview, evaluation_section
from mismatch_probe.report.findings import findings_section
from mismatch_probe.report.gate import gate_fact, gate_section
from mismatch_probe.report.rendering import PlotlyJs, plotly_js_of, rendered_page
from mismatch_probe.report.sections.confidence import confidence, scatter
from mismatch_probe.report.sections.corrections import corrections
from mismatch_probe.report.sections.errors import errors
from mismatch_probe.report.sections.length import length
from mismatch_probe.report.sections.overview import overview
from mismatch_probe.report.sections.provenance import provenance, reproduce, settings
from mismatch_probe.report.sections.responses import responses, worst
from mismatch_probe.report.sections.steps import counts, log, steps
from mismatch_probe.report.sections.subsamples import experts, vocabulary
from mismatch_probe.report.sections.verdicts import dtypes, verdicts
from mismatch_probe.report.tiles import with_advice_to_follow
from mismatch_probe.report.view import Section


@dataclass(frozen=True)
class Filed:
    """Results of `headroom`, `localize` and `explain`, what the responses earned, and what a gate said."""

    findings: Sequence[Document] = ()
    evaluation: Evaluation | None = None
    gate: GateResult | None = None

    @classmethod
    def of(cls, run: Path) -> Self:
        """All there is; an evaluation only where it is finished.

        Raises:
            BrokenRecord: a document is damaged, or of another version.
        """
        directory = EvaluationDirectory(run)
        evaluation = directory.read_evaluation() if directory.evaluation_path.exists() else None
        is_finished = evaluation is not None and evaluation.state == "finished"
        return cls(Findings(run).documents(), evaluation if is_finished else None, answer_of(run))

    @property
    def names(self) -> list[str]:
        """Of the files that it was read from."""
        names = [file_name(document) for document in self.findings]
        names += [] if self.evaluation is None else [EVALUATION]
        return names + ([] if self.gate is None else [GATE_FILE])


NOTHING_FILED: Final = Filed()


_FINE: Final = ("clean", "precision")
_DETAILS: Final = frozenset(
    {"scatter", "vocabulary", "experts", "confidence", "corrections", "worst", "counts", "settings", "provenance"}
)
"""Sections that open on request where nothing is wrong."""


def write_report(run: RunDirectory, plotly_js: PlotlyJs | None = None) -> Path:
    """Write `report.html` of a run from its `summary.json`, its `manifest.json` and what is filed beside them.

    plotly_js: unless given, as the page that is there has it.

    Raises:
        RunDirectoryError: a record is missing.
        BrokenRecord: a record cannot be read.
        StorageError: the disk refused the write.
    """
    filed = Filed.of(run.path)
    summary = with_advice_to_follow(run.read_summary(), run.path, filed.findings)
    plotly_js = plotly_js or plotly_js_of(run.report_path)
    write_text(run.report_path, render_html(summary, run.read_manifest(), filed, plotly_js))
    return run.report_path


def render_html(
    summary: Summary,
    manifest: Manifest,
    filed: Filed = NOTHING_FILED,
    plotly_js: PlotlyJs = PlotlyJs.EMBED,
) -> str:
    """The page, with a section for each thing that was filed in the run; the same records give the same bytes.

    Where the responses were evaluated, what they earned comes first.
    """
    evaluation, gate = filed.evaluation, filed.gate
    top = overview(summary, manifest) if evaluation is None else evaluation_overview(evaluation)
    shown = [
        None if evaluation is None else evaluation_section(evaluation, summary),
        None if gate is None else gate_section(gate),
        verdicts(summary),
        dtypes(summary),
        scatter(summary),
        steps(summary),
        length(summary),
        errors(summary),
        vocabulary(summary),
        *experts(summary),
        confidence(summary),
        corrections(summary),
        worst(summary, has_text=manifest.model.has_tokenizer),
        responses(summary),
        *map(findings_section, filed.findings),
        log(manifest),
        counts(summary),
        settings(summary, manifest),
        provenance(manifest),
        reproduce(manifest),
    ]
    sections = [section for section in shown if section is not None]
    return rendered_page(
        plotly_js,
        tool_version=manifest.tool_version,
        overview=top if gate is None else replace(top, facts=[gate_fact(gate), *top.facts]),
        sections=_with_details_folded(sections) if summary.verdict.kind in _FINE else sections,
        sources=["summary.json", "manifest.json", *filed.names],
        embedded=_embedded(summary),
    )


def _with_details_folded(sections: Sequence[Section]) -> list[Section]:
    return [replace(section, folded=section.anchor in _DETAILS) for section in sections]


def _embedded(summary: Summary) -> dict[str, Any]:
    """The summary as in `summary.json`, without curves and worst tokens, numbers to nine significant digits."""
    document: dict[str, Any] = _rounded(summary.model_dump(mode="json"))
    for pair in document["pairs"]:
        pair |= {"scatter": None, "confidence": [], "errors": [], "corrections": [], "worst_tokens": []}
        pair["worst_responses"] = []
        if pair["length"]:
            pair["length"] |= {name: [] for name, value in pair["length"].items() if isinstance(value, list)}
    return document


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
