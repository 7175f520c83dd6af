"""The page of a comparison of arrays, of which there is no run: the sections that need none."""

from mismatch_probe.records.summary import Summary
from mismatch_probe.report.interactive import PlotlyJs
from mismatch_probe.report.rendering import rendered_page
from mismatch_probe.report.sections.confidence import confidence
from mismatch_probe.report.sections.corrections import corrections
from mismatch_probe.report.sections.dtypes import dtypes
from mismatch_probe.report.sections.errors import errors
from mismatch_probe.report.sections.length import length
from mismatch_probe.report.sections.overview import overview_of
from mismatch_probe.report.sections.scatter import scatter
from mismatch_probe.report.sections.verdicts import verdicts


def render_arrays(summary: Summary) -> str:
    """HTML; the same summary gives the same bytes."""
    parts = (verdicts, dtypes, scatter, length, errors, confidence, corrections)
    sections = [part(summary) for part in parts]
    return rendered_page(
        PlotlyJs.EMBED,
        tool_version=summary.tool_version,
        overview=overview_of(summary, []),
        sections=[section for section in sections if section is not None],
        sources=["arrays"],
        embedded={},
    )
