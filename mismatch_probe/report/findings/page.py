"""`explain` on a page and on a screen: what explains each side of a log, and what was tried.

`report.html` of a folder that holds what `headroom` or `localize` found, and the same inside a comparison's page.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console

from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.notation import write_many, write_number, write_percent, write_seconds, write_size
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.findings import (
    Document,
    Explanation,
    Findings,
    Localization,
    SideExplanation,
    Trial,
    file_name,
)
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.report.findings.headroom import headroom_overview, headroom_sections
from mismatch_probe.report.findings.localize import localize_key, localize_label, localize_overview, localize_sections
from mismatch_probe.report.names import visible
from mismatch_probe.report.rendering import PlotlyJs, rendered_page
from mismatch_probe.report.screen import print_advice, print_line, print_titled
from mismatch_probe.report.sections.provenance import key_values
from mismatch_probe.report.view import Badge, Block, Cell, Finding, Note, Overview, Section, Table

SIDES = {"mu": "sampler", "pi": "trainer"}
_MOST_TRIALS = 12


def explain_anchor(explanation: Explanation) -> str:
    return "explain" if explanation.step is None else f"explain-step-{explanation.step}"


def explain_title(explanation: Explanation) -> str:
    return "What explains the log" + ("" if explanation.step is None else f": step {explanation.step}")


def explain_overview(explanation: Explanation) -> Overview:
    return Overview(
        subject="what explains the log",
        model=explanation.settings.model.path,
        headline=explanation.verdict.sentence,
        badge=Badge.of(explanation.verdict),
        facts=[
            f"{write_many(explanation.num_tokens, 'token')} of {write_many(explanation.num_responses, 'response')}",
        ],
        advice=explanation.verdict.advice,
        table=_sides(explanation),
        footnote="Rounding: what the declared dtype alone leaves on tokens of like probability. Parameters were fitted "
        "on other tokens than they are judged on.",
        contrasts=[],
        figure=None,
    )


def explain_sections(explanation: Explanation) -> list[Section]:
    blocks: list[Block] = [_finding(explanation, side) for side in explanation.sides]
    for side in explanation.sides:
        blocks.append(_trials(side))
        if side.left_out:
            blocks.append(
                Note(
                    f"Not tried on the {SIDES[side.side]}'s side:",
                    [f"{what}: {why}" for what, why in side.left_out.items()],
                )
            )
    return [Section("tried", "What was tried", "Each row was computed from the checkpoint.", blocks)]


def render_explanation(explanation: Explanation, console: Console) -> None:
    """The verdict, each side's, and what was tried."""
    print_line(console, "")
    print_line(console, explanation.verdict.sentence, "bold")
    for line in explanation.verdict.evidence:
        print_line(console, f"  {line}")
    print_titled(console, _sides(explanation))
    for side in explanation.sides:
        print_titled(console, _trials(side))
    print_advice(console, explanation.verdict.advice)


def _sides(explanation: Explanation) -> Table:
    rows: list[list[Cell]] = [
        [
            SIDES[side.side],
            Badge.of(side.verdict),
            visible(_words(side.explained_by)),
            _floors(side.trials[0]) if side.trials else "",
            "" if side.explained_by is None else _floors(side.explained_by),
        ]
        for side in explanation.sides
    ]
    columns = ["side", "verdict", "explained by", "as declared leaves", "explained leaves"]
    return Table("Each side of the log", columns, rows, text_columns=frozenset({1, 2}), stacked=True)


def _finding(explanation: Explanation, side: SideExplanation) -> Finding:
    verdict = side.verdict
    lists = [("Evidence", verdict.evidence), ("Advice", verdict.advice)]
    return Finding(
        f"{explain_anchor(explanation)}-{side.side}",
        f"the {SIDES[side.side]}'s side",
        Badge.of(verdict),
        verdict.sentence,
        [(heading, items) for heading, items in lists if items],
    )


def _trials(side: SideExplanation) -> Table:
    rows: list[list[Cell]] = [
        [visible(_words(trial)), write_percent(trial.explained), _floors(trial), write_number(trial.residual_nats)]
        for trial in side.trials[:_MOST_TRIALS]
    ]
    columns = ["if", "explains of the square", "leaves", "leaves, nats"]
    return Table(f"Tried on the {SIDES[side.side]}'s side", columns, rows)


def _words(trial: Trial | None) -> str:
    if trial is None:
        return "nothing that was tried"
    return " and ".join(departure.what for departure in trial.departures) or "as declared"


def _floors(trial: Trial) -> str:
    return f"{write_number(trial.residual_floors)} × rounding"


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
