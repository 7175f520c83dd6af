"""`report.html` of a folder that holds what `headroom` or `localize` found, and the same inside a comparison's page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.notation import write_seconds, write_size
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.explanation import Explanation
from mismatch_probe.records.findings import Document, Findings, file_name
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.localize import Localization
from mismatch_probe.report.findings.explain import (
    explain_anchor,
    explain_overview,
    explain_sections,
    explain_title,
)
from mismatch_probe.report.findings.headroom import headroom_overview, headroom_sections
from mismatch_probe.report.findings.localize import localize_key, localize_label, localize_overview, localize_sections
from mismatch_probe.report.interactive import PlotlyJs
from mismatch_probe.report.rendering import rendered_page
from mismatch_probe.report.sections.provenance import key_values
from mismatch_probe.report.view import Block, Finding, Note, Overview, Section


def write_findings_report(findings: Findings, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> Path:
    """Write the page of a folder from its one document.

    Raises:
        RunDirectoryError: there is none, or more than one.
        BrokenRecord: it cannot be read.
        StorageError: the disk refused the write.
    """
    documents = [document for document in findings.documents() if not isinstance(document, Explanation)]
    if len(documents) != 1:
        raise RunDirectoryError(
            f"{findings.folder} holds {len(documents)} results of headroom and localize, and a page shows one; give "
            "each a folder of its own, or file them in a run with --run"
        )
    path = findings.folder / "report.html"
    write_text(path, render_document(documents[0], plotly_js))
    return path


def render_document(document: Headroom | Localization, plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page of one document; the same document gives the same bytes."""
    answer = _Answer.of(document)
    return rendered_page(
        plotly_js,
        tool_version=document.tool_version,
        overview=answer.overview,
        sections=[*answer.sections, made(document)],
        sources=[file_name(document)],
        embedded=document.model_dump(mode="json"),
    )


def findings_section(document: Document) -> Section:
    """The document on the page of the run that it is filed in."""
    return _Answer.of(document).as_section()


@dataclass(frozen=True)
class _Answer:
    anchor: str
    title: str
    overview: Overview
    sections: list[Section]

    @classmethod
    def of(cls, document: Document) -> Self:
        if isinstance(document, Headroom):
            return cls("headroom", "Does it fit FP16", headroom_overview(document), headroom_sections(document))
        if isinstance(document, Explanation):
            overview, sections = explain_overview(document), explain_sections(document)
            return cls(explain_anchor(document), explain_title(document), overview, sections)
        anchor, title = f"localize-{localize_key(document)}", f"Which layer: {localize_label(document)}"
        return cls(anchor, title, localize_overview(document), localize_sections(document))

    def as_section(self) -> Section:
        """The whole page under one heading: verdict and advice, the table, the figures, then everything else."""
        top = self.overview
        lists = [("Advice", top.advice)] if top.advice else []
        blocks: list[Block] = [
            Finding(f"{self.anchor}-verdict", top.subject.capitalize(), top.badge, top.headline, lists),
            top.table,
        ]
        if top.figure is not None:
            blocks.append(top.figure)
        blocks += [block for section in self.sections for block in section.blocks]
        return Section(self.anchor, self.title, " · ".join([*top.facts, top.footnote]), blocks)


def made(document: Headroom | Localization) -> Section:
    """The last section of a page of its own."""
    seconds = {name.replace("_", " "): write_seconds(value) for name, value in document.seconds.items()}
    blocks: list[Block] = [key_values("Seconds of each stage", seconds)]
    if isinstance(document, Localization):
        blocks += cost(document)
    blocks.append(key_values("Settings, resolved", document.settings.model_dump(mode="json"), folded=True))
    return Section(
        "provenance",
        "Provenance",
        f"Measured {document.created_at} by mismatch-probe {document.tool_version}; checkpoint {document.model}, "
        f"fingerprint {document.model_fingerprint}.",
        blocks,
    )


def cost(localization: Localization) -> list[Block]:
    memory = [
        f"{job} job: at most {write_size(size)} of memory" for job, size in localization.peak_memory_bytes.items()
    ]
    return [Note("What it took:", [f"{write_size(localization.stored_bytes)} of activations on disk", *memory])]
