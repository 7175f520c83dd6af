"""What `import`, `score` and `diff --rescore` share: dtypes of flags, scoring with its progress, the run as shown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mismatch_probe.cli.output import narration, print_outcome, results
from mismatch_probe.cli.progress import progress_listener
from mismatch_probe.compare.cost.clock import run_clock
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.rescoring import open_rescoring, rescore
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, MismatchProbeError
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import prompts_of
from mismatch_probe.report.page import write_report
from mismatch_probe.report.screen import render_terminal


def rescored(responses: RunDirectory, settings_of: RunDirectory, out: Path, *, trust_remote_code: bool) -> RunDirectory:
    """A run at `out` of one run's responses with the other's settings, with its report.

    Raises:
        MismatchProbeError: it cannot be made; what was computed stays.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    console = narration()
    run = open_rescoring(out, responses, settings_of, trust_remote_code=trust_remote_code)
    rescore_telling(run, console)
    console.print(f"Report: {write_report(run)}", soft_wrap=True)
    return run


def rescore_telling(run: RunDirectory, console: Console) -> None:
    """Rescore, with its progress on the console.

    Raises:
        MismatchProbeError: it cannot be done; what was computed stays.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    try:
        manifest = run.read_manifest()
        prompts = prompts_of(read_prompts(run, manifest.run_key))
        clock = run_clock(Preparation(manifest, prompts), run)
        with progress_listener(console, run, clock) as listener:
            rescore(run, listener)
    except (KeyboardInterrupt, MismatchProbeError):
        console.print("What was computed is kept. Continue with the same command", soft_wrap=True)
        raise


def show_run(run: RunDirectory, *, json_output: bool) -> ExitCode:
    path, summary, console = write_report(run), run.read_summary(), results(as_json=json_output)
    render_terminal(summary, console, run.path)
    print_outcome(console, path, summary, as_json=json_output)
    return summary.exit_code


def with_dtypes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were given, dtypes parsed."""
    there = {name: value for name, value in given.items() if value is not None}
    return {name: Dtype.parse(value) if name.endswith("_dtype") else value for name, value in there.items()}
