"""`report.html` of a comparison and what other commands filed with it, and of a folder of one of those."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.notation import write_seconds, write_size
from mismatch_probe.records.answers import GATE_FILE, Evaluation, EvaluationDirectory, GateResult, answer_of
from mismatch_probe.records.examinations import Audit, Headroom
from mismatch_probe.records.files import CURVES_FILE, EVALUATION, write_text
from mismatch_probe.records.findings import Document, Explanation, Findings, Localization, file_name
from mismatch_probe.records.lines import CurvesDirectory
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.answers.audit import audit_answer
from mismatch_probe.report.answers.compare import compare_answer, run_facts, summary_of_run
from mismatch_probe.report.answers.curves import curves_answer
from mismatch_probe.report.answers.evaluate import evaluation_answer
from mismatch_probe.report.answers.explain import explain_anchor, explain_answer, explain_title
from mismatch_probe.report.answers.gate import gate_fact, gate_section
from mismatch_probe.report.answers.headroom import headroom_answer
from mismatch_probe.report.answers.localize import localize_answer, localize_key, localize_label
from mismatch_probe.report.rendering import PlotlyJs, plotly_js_of, render_page
from mismatch_probe.report.sections.confidence import confidence, scatter
from mismatch_probe.report.sections.corrections import corrections
from mismatch_probe.report.sections.errors import errors
from mismatch_probe.report.sections.length import length
from mismatch_probe.report.sections.provenance import key_values, provenance, reproduce, settings
from mismatch_probe.report.sections.responses import responses, worst
from mismatch_probe.report.sections.steps import counts, log, steps
from mismatch_probe.report.sections.subsamples import experts, vocabulary
from mismatch_probe.report.sections.verdicts import dtypes, verdicts
from mismatch_probe.report.view import Answer, Block, Note, Section
from mismatch_probe.verdict.findings import with_findings
from mismatch_probe.verdict.headline import foremost, grows


@dataclass(frozen=True)
class Filed:
    """Results of `headroom`, `localize`, `explain` and `audit`, what the responses earned, and the answer of a gate."""

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
_DETAILS_OF_LOG: Final = _DETAILS | {"dtypes", "length", "errors", "responses"}


def write_report(run: RunDirectory, plotly_js: PlotlyJs | None = None) -> Path:
    """Write `report.html` of a run from its `summary.json`, its `manifest.json` and what others filed in its folder.

    plotly_js: unless given, as the page that is there has it.

    Raises:
        RunDirectoryError: a record is missing.
        BrokenRecord: a record cannot be read.
        StorageError: the disk refused the write.
    """
    documents = Filed.of(run.path)
    summary = summary_of_run(run.read_summary(), run.path, documents.findings)
    plotly_js = plotly_js or plotly_js_of(run.report_path)
    write_text(run.report_path, render_html(summary, run.read_manifest(), documents, plotly_js))
    return run.report_path


def render_html(
    summary: Summary,
    manifest: Manifest,
    documents: Filed = NOTHING_FILED,
    plotly_js: PlotlyJs = PlotlyJs.EMBED,
) -> str:
    """The page, with a section for each thing that was filed in the run; the same records give the same bytes.

    Where the responses were evaluated, what they earned comes first.
    """
    summary = with_findings(summary, documents.findings)
    answer = run_answer(summary, manifest, documents)
    return render_page(
        answer,
        plotly_js,
        tool_version=manifest.tool_version,
        sources=["summary.json", "manifest.json", *documents.names],
        document=_document_of(summary),
    )


_NOT_IN_A_CELL: Final = frozenset({"corrections", "responses", "settings", "provenance"})
"""Sections that take half of a page, and that a notebook does without."""


def render_cell(summary: Summary, manifest: Manifest, documents: Filed) -> str:
    """The page as a notebook holds it: without its largest details, and the summary that lies in a page."""
    answer = run_answer(summary, manifest, documents)
    return render_page(
        replace(
            answer,
            facts=[*answer.facts, "responses, corrections, settings and provenance: report.html of the run"],
            sections=[section for section in answer.sections if section.anchor not in _NOT_IN_A_CELL],
        ),
        PlotlyJs.CDN,
        tool_version=manifest.tool_version,
        sources=["summary.json", "manifest.json", *documents.names],
        document={},
    )


def run_answer(summary: Summary, manifest: Manifest, documents: Filed = NOTHING_FILED) -> Answer:
    """What the page of a run shows, with all its sections."""
    evaluation, gate = documents.evaluation, documents.gate
    summary = with_findings(summary, documents.findings)
    if evaluation is None:
        answer = compare_answer(summary, documents.findings, run_facts(summary, manifest))
    else:
        answer = evaluation_answer(evaluation, summary)
    of_gate = None if gate is None else gate_section(gate)
    is_refused = gate is not None and gate.answer == "error"
    leads, usable = grows(foremost(summary.pairs)), without_broken(summary)
    possible_sections = [
        *answer.sections,
        None if is_refused else of_gate,
        steps(summary) if leads else None,
        verdicts(summary),
        *([] if usable is None else [dtypes(usable), *_figures(usable, with_steps=not leads)]),
        worst(summary, has_text=manifest.model.has_tokenizer, is_import=manifest.log is not None),
        responses(summary),
        *map(findings_section, documents.findings),
        log(manifest),
        of_gate if is_refused else None,
        counts(summary),
        settings(summary, manifest),
        provenance(manifest),
        reproduce(manifest),
    ]
    sections = [section for section in possible_sections if section is not None]
    return replace(
        answer,
        facts=answer.facts if gate is None or is_refused else [gate_fact(gate), *answer.facts],
        sections=_with_details_folded(sections, _details(summary, manifest)),
    )


def without_broken(summary: Summary) -> Summary | None:
    """The summary of the pairs that were measured; None where there is none, so that there is nothing to draw."""
    pairs = [pair for pair in summary.pairs if pair.verdict.kind != "broken"]
    return summary.model_copy(update={"pairs": pairs}) if pairs else None


def _figures(summary: Summary, *, with_steps: bool) -> list[Section | None]:
    """The sections that draw what was measured."""
    return [
        scatter(summary),
        steps(summary) if with_steps else None,
        length(summary),
        errors(summary),
        vocabulary(summary),
        *experts(summary),
        confidence(summary),
        corrections(summary),
    ]


def _details(summary: Summary, manifest: Manifest) -> frozenset[str]:
    """What opens on request. Of a log the answer leads to what it lacks or to what changed, and rarely to these; the
    tokens that a bug is seen in stay open.
    """
    if summary.verdict.kind in _FINE:
        return _DETAILS
    if manifest.log is None:
        return frozenset()
    return _DETAILS_OF_LOG - ({"worst", "responses"} if summary.verdict.kind == "bug" else set())


def _with_details_folded(sections: Sequence[Section], details: frozenset[str]) -> list[Section]:
    return [replace(section, is_folded=section.anchor in details) for section in sections]


def _document_of(summary: Summary) -> dict[str, Any]:
    """The summary as in `summary.json`, without curves and worst tokens, numbers to nine significant digits."""
    document: dict[str, Any] = _round_numbers(summary.model_dump(mode="json"))
    for pair in document["pairs"]:
        pair |= {"scatter": None, "confidence": [], "errors": [], "corrections": [], "worst_tokens": []}
        pair["worst_responses"] = []
        if pair["length"]:
            pair["length"] |= {name: [] for name, value in pair["length"].items() if isinstance(value, list)}
    return document


def _round_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _round_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_round_numbers(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def render_arrays(summary: Summary, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page of a comparison of arrays; the same summary gives the same bytes."""
    usable = without_broken(summary)
    parts = (dtypes, scatter, length, errors, confidence, corrections)
    sections = [verdicts(summary), *(part(usable) for part in parts if usable is not None)]
    answer = replace(compare_answer(summary), sections=[section for section in sections if section is not None])
    return render_page(answer, plotly_js, tool_version=summary.tool_version, sources=["arrays"], document={})


def full_summary(run: RunDirectory) -> Summary:
    """The summary of a run, with what other commands filed there: what `--json` prints.

    Raises:
        RunDirectoryError: there is none.
        BrokenRecord: it or a document is damaged, or of another version.
    """
    return with_findings(run.read_summary(), Findings(run.path).documents())


def answer_on_screen(summary: Summary, run: Path) -> Answer:
    """The answer of the run in the folder `run`, with what other commands filed there.

    Raises:
        BrokenRecord: a document is damaged, or of another version.
    """
    documents = Findings(run).documents()
    return compare_answer(summary_of_run(summary, run, documents), documents)


def write_findings_report(
    findings: Findings, plotly_js: PlotlyJs = PlotlyJs.EMBED
) -> tuple[Path, Headroom | Localization | Audit]:
    """Write the page of a folder from its one document; returns the page and the document.

    Raises:
        RunDirectoryError: there is none, or more than one.
        BrokenRecord: it cannot be read.
        StorageError: the disk refused the write.
    """
    documents = [document for document in findings.documents() if not isinstance(document, Explanation)]
    if len(documents) != 1:
        raise RunDirectoryError(
            f"{findings.folder} holds {len(documents)} results of headroom, localize and audit, and a page shows one; "
            "give each a folder of its own, or file them in a run with --run"
        )
    path = findings.folder / "report.html"
    write_text(path, render_document(documents[0], plotly_js))
    return path, documents[0]


def render_document(document: Headroom | Localization | Audit, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page of one document; the same document gives the same bytes."""
    answer = document_answer(document)
    return render_page(
        replace(answer, sections=[*answer.sections, _provenance(document)]),
        plotly_js,
        tool_version=document.tool_version,
        sources=[file_name(document)],
        document=document.model_dump(mode="json"),
    )


def write_curves_report(folder: CurvesDirectory, plotly_js: PlotlyJs | None = None) -> Path:
    """Write the page of a reading of metrics. Raises as `CurvesDirectory.read` and `write_findings_report`.

    plotly_js: unless given, as the page that is there has it.
    """
    reading = folder.read()
    page = render_page(
        curves_answer(reading),
        plotly_js or plotly_js_of(folder.report_path),
        tool_version=reading.tool_version,
        sources=[CURVES_FILE],
        document=reading.model_dump(mode="json"),
    )
    write_text(folder.report_path, page)
    return folder.report_path


def document_answer(document: Document) -> Answer:
    if isinstance(document, Headroom):
        return headroom_answer(document)
    if isinstance(document, Audit):
        return audit_answer(document)
    return explain_answer(document) if isinstance(document, Explanation) else localize_answer(document)


def findings_section(document: Document) -> Section:
    """The document on the page of the run that it is filed in."""
    if isinstance(document, Headroom):
        anchor, title = "headroom", "Does it fit FP16"
    elif isinstance(document, Audit):
        anchor, title = "audit", "Does the server serve what it should"
    elif isinstance(document, Explanation):
        anchor, title = explain_anchor(document), explain_title(document)
    else:
        anchor, title = f"localize-{localize_key(document)}", f"Which layer: {localize_label(document)}"
    return document_answer(document).as_section(anchor, title)


def _provenance(document: Headroom | Localization | Audit) -> Section:
    """The last section of a page of its own."""
    seconds = {name.replace("_", " "): write_seconds(value) for name, value in document.seconds.items()}
    blocks: list[Block] = [key_values("Seconds of each stage", seconds)]
    if isinstance(document, Localization):
        blocks += _cost(document)
    blocks.append(key_values("Settings, resolved", document.settings.model_dump(mode="json"), is_folded=True))
    return Section(
        "provenance",
        "Provenance",
        f"Measured {document.created_at} by mismatch-probe {document.tool_version}; checkpoint {document.model}, "
        f"fingerprint {document.model_fingerprint}.",
        blocks,
    )


def _cost(localization: Localization) -> list[Block]:
    memory = [
        f"{job} job: at most {write_size(size)} of memory" for job, size in localization.peak_memory_bytes.items()
    ]
    return [Note("What it took:", [f"{write_size(localization.stored_bytes)} of activations on disk", *memory])]
