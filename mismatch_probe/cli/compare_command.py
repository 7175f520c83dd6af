"""What `compare` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import time
from pathlib import Path
from typing import Any

from mismatch_probe.cli.dry_run import show_dry_run
from mismatch_probe.cli.gated_compare import GatedCompare
from mismatch_probe.cli.output import can_go_on, narration, print_json, print_outcome, results
from mismatch_probe.cli.progress import progress_listener
from mismatch_probe.compare.cost.clock import run_clock
from mismatch_probe.compare.estimates import done_stages, look_ahead
from mismatch_probe.compare.preflight import with_typed_engines
from mismatch_probe.compare.preparation import default_run_path, prepare
from mismatch_probe.compare.run import execute, resume_run, start_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.given_now import going_on_comparing
from mismatch_probe.config.load import given_settings, parse_settings
from mismatch_probe.config.spelling import held_by_ranks
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.gate.console import render_gate
from mismatch_probe.records.kinds import Kind, to_resume
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import write_report
from mismatch_probe.report.screen import render_terminal


def run_compare(
    flags: dict[str, Any],
    *,
    ranks: int | None,
    config: Path | None,
    out: Path | None,
    resume: bool,
    json_output: bool,
    dry_run: bool,
    gate: Path | None,
    baseline: Path | None,
    without_baseline: bool,
) -> ExitCode:
    """Parse, validate, run, summarise, export. ranks: those that torchrun started, which hold every model.

    Raises:
        MismatchProbeError: anything that stops the run, as one sentence.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    began = time.monotonic()
    console = narration()
    if (baseline is not None or without_baseline) and gate is None:
        flag = "--without-baseline" if without_baseline else "--baseline"
        raise UsageError(f"{flag} needs --gate: the file that says how much worse than a baseline is too much")
    recorded = RunDirectory(to_resume(out, Kind.COMPARISON)) if resume else None
    settings = _settings(flags, config, recorded)
    if ranks is not None:
        settings = held_by_ranks(settings, ranks)
    gated = None if gate is None else GatedCompare.open(gate, baseline, without_baseline=without_baseline)
    if gated is not None:
        settings = gated.settings_to_start(settings, recorded, console)
    path = out or default_run_path()
    if recorded is None and not dry_run:
        RunDirectory(path).require_free()
    preparation = prepare(settings, rehearsed=dry_run)
    if dry_run:
        plan = look_ahead(preparation, path.parent, done_stages(recorded), time.monotonic() - began)
        show_dry_run(plan, results(as_json=json_output))
        if json_output:
            print_json(plan)
        return ExitCode.PASS
    run = start_run(path, preparation) if recorded is None else resume_run(path, preparation)
    again = () if gated is None else gated.flags
    with can_go_on("compare", run, settings.model_dump(), console, is_new=recorded is None, given=again):
        ready_seconds = time.monotonic() - began if console.is_terminal else None
        clock = run_clock(preparation, run, ready_seconds=ready_seconds)
        with progress_listener(console, run, clock) as listener:
            execute(run, listener)
        write_report(run)
        judged = None if gated is None else gated.run(run, console, lambda: write_report(run))
    summary, console = run.read_summary(), results(as_json=json_output)
    render_terminal(summary, console, run.path)
    if judged is not None:
        console.print()
        render_gate(judged, console)
    print_outcome(console, run.report_path, summary, as_json=json_output)
    return summary.exit_code if judged is None else judged.exit_code


def _settings(flags: dict[str, Any], config: Path | None, recorded: RunDirectory | None) -> CompareSettings:
    values = given_settings(config, flags)
    if recorded is not None:
        return going_on_comparing(recorded.path, recorded.read_manifest().asked_settings, values, with_typed_engines)
    if "model" not in values:
        raise UsageError("no model to compare; give --model FOLDER, a hub id, or `--model demo`")
    return parse_settings(CompareSettings, values)
