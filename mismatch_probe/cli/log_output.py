"""What `import` and `score` share: dtypes as they are given, and the run as it is shown."""

from collections.abc import Mapping
from typing import Any

from mismatch_probe.cli.output import print_outcome, results
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import write_report
from mismatch_probe.report.screen import render_terminal


def show_run(run: RunDirectory, *, json_output: bool) -> ExitCode:
    path, summary, console = write_report(run), run.read_summary(), results(as_json=json_output)
    render_terminal(summary, console, run.path)
    print_outcome(console, path, summary, as_json=json_output)
    return summary.exit_code


def with_dtypes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, dtypes parsed."""
    there = {name: value for name, value in given.items() if value is not None}
    return {name: Dtype.parse(value) if name.endswith("_dtype") else value for name, value in there.items()}
