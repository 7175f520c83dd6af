"""`mismatch-probe report RUN`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from mismatch_probe.errors import ExitCode, UsageError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directory, or what headroom or localize wrote; several training runs share a page.",
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
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> ExitCode:
    """Render a run's report again from its files; needs neither engine nor GPU. Ends with 4 where data is broken."""
    from mismatch_probe.cli.report_command import report_comparison, report_findings, report_training
    from mismatch_probe.records.kinds import FINDINGS, TRAININGS, kind_of
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.records.training_run import TrainingDirectory
    from mismatch_probe.report.rendering import PlotlyJs

    plotly_js = PlotlyJs(plotlyjs)
    kinds = [kind_of(run) for run in runs]
    other = [run for run, kind in zip(runs, kinds, strict=True) if kind not in TRAININGS]
    if len(other) < len(runs):
        if other:
            raise UsageError(f"{other[0]} is no training run, and only training runs share a page; leave it out")
        if recompute:
            raise UsageError("--recompute is for comparisons; a training run's report is always made from its metrics")
        report_training([TrainingDirectory(run) for run in runs], out, plotly_js=plotly_js, json_output=json_output)
    elif len(runs) > 1 or out is not None:
        raise UsageError("only training runs share a page or go to --out; give one comparison alone")
    elif kinds[0] in FINDINGS:
        if recompute:
            raise UsageError("--recompute is for comparisons; what headroom and localize found is shown as it was")
        report_findings(runs[0], plotly_js=plotly_js, json_output=json_output)
    else:
        return report_comparison(
            RunDirectory(runs[0]), recompute=recompute, plotly_js=plotly_js, json_output=json_output
        )
    return ExitCode.PASS
