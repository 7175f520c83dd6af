"""`mismatch-probe report RUN` and `mismatch-probe diff A B`: runs that are there, shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mismatch_probe.cli import options
from mismatch_probe.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.records.training_run import TrainingDirectory
    from mismatch_probe.report.rendering import PlotlyJs


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run directory, or what headroom, localize or audit wrote; several training runs share a page.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Page of training runs to write instead of RUN/report.html.")] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute statistics and verdict again from the recorded legs.")
    ] = False,
    plotlyjs: Annotated[
        Literal["embed", "cdn"],
        typer.Option(
            help="Where the page has plotly.js from: compressed in it (2 MB, needs no network), or plotly's server."
        ),
    ] = "embed",
    issue: Annotated[
        bool,
        typer.Option(
            "--issue",
            help="Print one Markdown block to paste into an issue: versions, numbers, what was ruled out, the command.",
        ),
    ] = False,
    with_paths: Annotated[bool, typer.Option("--with-paths", help="--issue names files and folders too.")] = False,
    with_text: Annotated[bool, typer.Option("--with-text", help="--issue shows the worst tokens too.")] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Render a run's report again from its files; needs neither engine nor GPU. Ends with 4 where data is broken."""
    from mismatch_probe.records.files import COMPARISONS, FINDINGS, TRAININGS, RunKind, kind_of
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.records.training_run import TrainingDirectory
    from mismatch_probe.report.rendering import PlotlyJs

    plotly_js = PlotlyJs(plotlyjs)
    kinds = [kind_of(run) for run in runs]
    other = [run for run, kind in zip(runs, kinds, strict=True) if kind not in TRAININGS]
    if (with_paths or with_text) and not issue:
        raise UsageError("--with-paths and --with-text say what --issue holds; give it too")
    if issue:
        kind = kinds[0]
        if len(runs) > 1 or json_output or recompute or kind not in (*COMPARISONS, *TRAININGS, RunKind.CURVES, None):
            raise UsageError(
                "--issue prints the block of one comparison, imported log or training run, and takes no other flag"
            )
        if with_text and kind in (*TRAININGS, RunKind.CURVES):
            raise UsageError("--with-text shows tokens, and metrics have none; leave it out")
        if kind in TRAININGS:
            return _print_issue_of_training(TrainingDirectory(runs[0]), has_paths=with_paths)
        if kind is RunKind.CURVES:
            return _print_issue_of_curves(runs[0], has_paths=with_paths)
        return _print_issue(RunDirectory(runs[0]), has_paths=with_paths, has_text=with_text)
    if len(other) < len(runs):
        if other:
            raise UsageError(f"{other[0]} is no training run, and only training runs share a page; leave it out")
        if recompute:
            raise UsageError("--recompute is for comparisons; a training run's report is always made from its metrics")
        _report_training([TrainingDirectory(run) for run in runs], out, plotly_js=plotly_js, json_output=json_output)
    elif len(runs) > 1 or out is not None:
        raise UsageError("only training runs share a page or go to --out; give one comparison alone")
    elif kinds[0] in FINDINGS:
        if recompute:
            raise UsageError("--recompute is for comparisons; what headroom and localize found is shown as it was")
        _report_findings(runs[0], plotly_js=plotly_js, json_output=json_output)
    elif kinds[0] is RunKind.ABLATION:
        if recompute:
            raise UsageError("--recompute is for comparisons; an ablation's report is always made from its cells")
        return _report_ablation(runs[0], plotly_js=plotly_js, json_output=json_output)
    elif kinds[0] is RunKind.CURVES:
        if recompute:
            raise UsageError("--recompute is for comparisons; a reading of metrics is made again by `import`")
        return _report_curves(runs[0], plotly_js=plotly_js, json_output=json_output)
    else:
        return _report_comparison(
            RunDirectory(runs[0]), recompute=recompute, plotly_js=plotly_js, json_output=json_output
        )
    return ExitCode.PASS


def _report_comparison(directory: RunDirectory, *, recompute: bool, plotly_js: PlotlyJs, json_output: bool) -> ExitCode:
    """Render a comparison again, its statistics computed anew where asked; the exit code is that of `compare`.

    Of an evaluation the accuracy comes first, and the comparison that it rests on below.

    Raises:
        RunDirectoryError: a record is missing.
        BrokenRecord: a record cannot be read.
        StorageError: the disk refused the write.
    """
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.compare.summarise import summarise
    from mismatch_probe.report.answers.evaluate import evaluation_answer
    from mismatch_probe.report.page import Filed, answer_on_screen, full_summary, write_report
    from mismatch_probe.report.screen import print_answer, print_line

    if recompute:
        with directory.lock():
            directory.write_summary(summarise(directory, directory.read_manifest()))
    summary = full_summary(directory)
    console = results(as_json=json_output)
    path = write_report(directory, plotly_js)
    evaluation = Filed.of(directory.path).evaluation
    if evaluation is not None:
        print_answer(evaluation_answer(evaluation), console)
        print_line(console, "")
        print_line(console, "The mismatch behind it", style="bold")
    print_answer(answer_on_screen(summary, directory.path), console)
    print_outcome(console, path, summary, as_json=json_output)
    return summary.exit_code


def _print_issue(directory: RunDirectory, *, has_paths: bool, has_text: bool) -> ExitCode:
    """Print the Markdown block of a run; the exit code is that of `compare`. Raises as `full_summary`."""
    from mismatch_probe.records.findings import Findings
    from mismatch_probe.report.markdown import Issue
    from mismatch_probe.report.page import full_summary

    summary, documents = full_summary(directory), Findings(directory.path).documents()
    block = Issue(summary, directory.read_manifest(), documents, directory.path, has_paths=has_paths, has_text=has_text)
    typer.echo(str(block), nl=False)
    return summary.exit_code


def _print_issue_of_training(directory: TrainingDirectory, *, has_paths: bool) -> ExitCode:
    """Print the Markdown block of a training run. Raises as `read_runs`."""
    from mismatch_probe.report.answers.train import training_answer
    from mismatch_probe.report.markdown import issue_of_answer, versions_and_hardware
    from mismatch_probe.report.training.page import read_runs

    manifest = directory.read_training_manifest()
    places = {
        manifest.settings.model.path: "CHECKPOINT",
        manifest.model.folder: "CHECKPOINT",
        str(directory.path): "RUN",
        str(directory.path.resolve()): "RUN",
    }
    block = issue_of_answer(
        training_answer(read_runs([directory], directory.report_path)),
        [
            f"model {manifest.model.name}: {manifest.model.architecture}",
            *versions_and_hardware(manifest.versions, manifest.hardware),
        ],
        [manifest.command],
        {path: place for path, place in places.items() if "/" in path},
        has_paths=has_paths,
    )
    typer.echo(block, nl=False)
    return ExitCode.PASS


def _print_issue_of_curves(folder: Path, *, has_paths: bool) -> ExitCode:
    """Print the Markdown block of metrics alone. Raises BrokenRecord: it cannot be read."""
    from mismatch_probe.records.lines import CurvesDirectory
    from mismatch_probe.report.answers.curves import curves_answer
    from mismatch_probe.report.markdown import issue_of_answer

    reading = CurvesDirectory(folder).read()
    places = {path: "LOG" for path in (reading.source, *reading.files) if "/" in path}
    basis = [f"mismatch-probe {reading.tool_version}"]
    command = ["mismatch-probe", "import", reading.source, "--out", str(folder)]
    typer.echo(issue_of_answer(curves_answer(reading), basis, [command], places, has_paths=has_paths), nl=False)
    return reading.exit_code


def _report_findings(folder: Path, *, plotly_js: PlotlyJs, json_output: bool) -> None:
    """Render what `headroom` or `localize` found.

    Raises:
        RunDirectoryError: the folder holds more than one result.
        BrokenRecord: it cannot be read.
        StorageError: the disk refused the write.
    """
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.records.findings import Findings
    from mismatch_probe.report.page import document_answer, write_findings_report
    from mismatch_probe.report.screen import print_answer

    findings = Findings(folder)
    path, document = write_findings_report(findings, plotly_js)
    console = results(as_json=json_output)
    print_answer(document_answer(document), console)
    print_outcome(console, path, document, as_json=json_output)


def _report_ablation(folder: Path, *, plotly_js: PlotlyJs, json_output: bool) -> ExitCode:
    """Render an ablation, finished or not, from the files of its cells.

    Raises:
        BrokenRecord: a file cannot be read.
        StorageError: the disk refused the write.
    """
    from mismatch_probe.ablate.summarise import publish_ablation
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.records.ablation import AblationDirectory
    from mismatch_probe.report.answers.ablate import ablation_answer
    from mismatch_probe.report.screen import print_answer

    directory = AblationDirectory(folder)
    result = publish_ablation(directory, plotly_js)
    console = results(as_json=json_output)
    print_answer(ablation_answer(result), console)
    print_outcome(console, directory.report_path, result, as_json=json_output)
    return result.exit_code


def _report_curves(folder: Path, *, plotly_js: PlotlyJs, json_output: bool) -> ExitCode:
    """Render what `import` read in metrics alone.

    Raises:
        BrokenRecord: it cannot be read.
        StorageError: the disk refused the write.
    """
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.records.lines import CurvesDirectory
    from mismatch_probe.report.answers.curves import curves_answer
    from mismatch_probe.report.page import write_curves_report
    from mismatch_probe.report.screen import print_answer

    directory = CurvesDirectory(folder)
    path, reading = write_curves_report(directory, plotly_js), directory.read()
    console = results(as_json=json_output)
    print_answer(curves_answer(reading), console)
    print_outcome(console, path, reading, as_json=json_output)
    return reading.exit_code


def _report_training(
    directories: Sequence[TrainingDirectory], out: Path | None, *, plotly_js: PlotlyJs, json_output: bool
) -> None:
    """Render one training run, or several on one page; of a sanity test, whether it is passed comes first.

    Raises:
        UsageError: several runs without `out`, or with one JSON document asked for.
        RunDirectoryError: a folder holds no training run.
        BrokenRecord: a file cannot be read.
        StorageError: the disk refused the write.
    """
    from mismatch_probe.cli.output import print_outcome, require_no_run_file, results
    from mismatch_probe.report.answers.train import training_answer
    from mismatch_probe.report.screen import print_answer
    from mismatch_probe.report.training.page import write_training_report

    if len(directories) > 1 and out is None:
        raise UsageError("several runs make one page; name it with --out FILE")
    if len(directories) > 1 and json_output:
        raise UsageError("--json prints the result of one run; give one run, or leave --json out")
    path = directories[0].report_path if out is None else out
    require_no_run_file("--out", path, own=directories[0].report_path if len(directories) == 1 else None)
    console = results(as_json=json_output)
    runs = write_training_report(directories, path, plotly_js)
    print_answer(training_answer(runs), console)
    print_outcome(console, path, runs[0][1], as_json=json_output)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Run directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Run directory that is compared with it.")],
    rescore: Annotated[
        bool,
        typer.Option("--rescore", help="Score A's responses with B's settings first: the same tokens on both sides."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run directory that --rescore writes, or continues.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="HTML page to write: what changed, and both runs in figures.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="--rescore may run the code that B's settings name.")
    ] = False,
    json_output: options.JsonOutput = False,
) -> None:
    """Compare two runs: what changed between them, and how much each metric changed, with intervals."""
    from mismatch_probe.cli.output import print_outcome, require_no_run_file, results
    from mismatch_probe.difference.runs import difference_of
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.report.answers.diff import difference_answer, write_difference
    from mismatch_probe.report.screen import print_answer

    old, new = RunDirectory(first), RunDirectory(second)
    if rescore and out is None:
        raise UsageError("--rescore needs a place for the run that A's responses are scored into: add --out")
    if out is not None and not rescore:
        raise UsageError("--out is for --rescore: the run that A's responses are scored into; give --html for a page")
    if html is not None:
        require_no_run_file("--html", html)
    if out is None:
        difference = difference_of(old, new)
    else:
        from mismatch_probe.cli.output import rescore_run

        difference = difference_of(
            old, rescore_run(old, new, out, trust_remote_code=trust_remote_code), rescored_with=new
        )
    console = results(as_json=json_output)
    print_answer(difference_answer(difference), console)
    if html is not None:
        write_difference(difference, html)
    print_outcome(console, html, difference, as_json=json_output)
