"""The page of one training run, or of several with their curves in one figure, from their files alone."""

from collections.abc import Sequence
from pathlib import Path

from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.training_run import TrainingDirectory, TrainingSummary
from mismatch_probe.report.interactive import PlotlyJs
from mismatch_probe.report.rendering import rendered_page
from mismatch_probe.report.training.course import Course, read_courses
from mismatch_probe.report.training.details import metrics, provenance, reproduce, settings
from mismatch_probe.report.training.dynamics import dynamics
from mismatch_probe.report.training.firings import guards
from mismatch_probe.report.training.overview import overview
from mismatch_probe.report.training.summarise import summarise_course

_SOURCES = ["manifest.json", "metrics.jsonl", "events.jsonl"]


def write_training_report(
    directories: Sequence[TrainingDirectory], path: Path, plotly_js: PlotlyJs = PlotlyJs.EMBED
) -> list[TrainingSummary]:
    """Write the page of some runs, finished or not, to `path`; returns what came of each.

    Raises:
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read by this version.
        StorageError: the disk refused the write.
    """
    courses = read_courses(directories)
    runs = [(course, summarise_course(course, str(path))) for course in courses]
    write_text(path, render_training(runs, plotly_js))
    return [summary for _, summary in runs]


def summarise_training(directory: TrainingDirectory) -> TrainingSummary:
    """What came of a run. Raises as `write_training_report`."""
    [course] = read_courses([directory])
    return summarise_course(course, str(directory.report_path))


def render_training(runs: Sequence[tuple[Course, TrainingSummary]], plotly_js: PlotlyJs = PlotlyJs.EMBED) -> str:
    """The page; the same records give the same bytes."""
    courses = [course for course, _ in runs]
    return rendered_page(
        plotly_js,
        tool_version=courses[0].manifest.tool_version,
        overview=overview(runs),
        sections=[
            guards(courses),
            *dynamics(courses),
            metrics(runs),
            settings(courses),
            provenance(courses),
            reproduce(courses),
        ],
        sources=_SOURCES,
        embedded=[summary.model_dump(mode="json") for _, summary in runs],
    )
