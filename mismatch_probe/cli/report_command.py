"""What `report` does for a comparison, for what was found beside one, and for training runs."""

from collections.abc import Sequence
from pathlib import Path

from mismatch_probe.cli.output import print_outcome, require_no_run_file, results
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.headroom.sentences import render_headroom
from mismatch_probe.localize.console import render_localization
from mismatch_probe.records.findings import Findings, Localization
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.training_run import SanityDirectory, TrainingDirectory
from mismatch_probe.report.evaluation import render_evaluation
from mismatch_probe.report.findings import write_findings_report
from mismatch_probe.report.page import Filed, write_report
from mismatch_probe.report.rendering import PlotlyJs
from mismatch_probe.report.screen import print_line, render_terminal
from mismatch_probe.report.training import render_outcome, render_sanity, write_training_report


def report_comparison(directory: RunDirectory, *, recompute: bool, plotly_js: PlotlyJs, json_output: bool) -> ExitCode:
    """Render a comparison again, its statistics computed anew where asked; the exit code is that of `compare`.

    Of an evaluation the accuracy comes first, and the comparison that it rests on below.

    Raises:
        RunDirectoryError: a record is missing.
        BrokenRecord: a record cannot be read.
        StorageError: the disk refused the write.
    """
    if recompute:
        with directory.locked():
            directory.write_summary(summarise(directory, directory.read_manifest()))
    summary = directory.read_summary()
    console = results(as_json=json_output)
    path = write_report(directory, plotly_js)
    evaluation = Filed.of(directory.path).evaluation
    if evaluation is not None:
        render_evaluation(evaluation, console)
        print_line(console, "")
        print_line(console, "The mismatch behind it", style="bold")
    render_terminal(summary, console, directory.path)
    print_outcome(console, path, summary, as_json=json_output)
    return summary.exit_code


def report_findings(folder: Path, *, plotly_js: PlotlyJs, json_output: bool) -> None:
    """Render what `headroom` or `localize` found.

    Raises:
        RunDirectoryError: the folder holds more than one result.
        BrokenRecord: it cannot be read.
        StorageError: the disk refused the write.
    """
    findings = Findings(folder)
    path, document, console = (
        write_findings_report(findings, plotly_js),
        findings.documents()[0],
        results(as_json=json_output),
    )
    if isinstance(document, Headroom):
        render_headroom(document, console)
    elif isinstance(document, Localization):
        render_localization(document, console)
    print_outcome(console, path, document, as_json=json_output)


def report_training(
    directories: Sequence[TrainingDirectory], out: Path | None, *, plotly_js: PlotlyJs, json_output: bool
) -> None:
    """Render one training run, or several on one page; of a sanity test, whether it is passed comes first.

    Raises:
        UsageError: several runs without `out`, or with one JSON document asked for.
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read.
        StorageError: the disk refused the write.
    """
    if len(directories) > 1 and out is None:
        raise UsageError("several runs make one page; name it with --out FILE")
    if len(directories) > 1 and json_output:
        raise UsageError("--json prints what came of one run; give one run, or leave --json out")
    path = directories[0].report_path if out is None else out
    require_no_run_file("--out", path, own=directories[0].report_path if len(directories) == 1 else None)
    console = results(as_json=json_output)
    summaries = write_training_report(directories, path, plotly_js)
    for directory, summary in zip(directories, summaries, strict=True):
        sanity = SanityDirectory(directory.path)
        if sanity.sanity_path.exists():
            render_sanity(sanity.read_sanity(), console)
        render_outcome(summary, console, label=directory.path.name if len(directories) > 1 else "")
    print_outcome(console, path, summaries[0], as_json=json_output)
