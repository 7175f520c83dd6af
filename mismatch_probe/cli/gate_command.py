"""What `gate` does once its flags are parsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from mismatch_probe.cli.output import people, print_json
from mismatch_probe.errors import MismatchProbeError, UsageError
from mismatch_probe.gate.calibrate import calibrate
from mismatch_probe.gate.console import render_floor, render_gate
from mismatch_probe.gate.floor import write_floor
from mismatch_probe.gate.github import annotations, append_summary, summary_path
from mismatch_probe.gate.junit import write_junit
from mismatch_probe.gate.load import load_gate
from mismatch_probe.gate.markdown import render_markdown
from mismatch_probe.gate.reading import open_run
from mismatch_probe.gate.result import GateResult
from mismatch_probe.gate.run import refused, run_gate
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.run_directory import RunDirectory


@dataclass(frozen=True)
class Outputs:
    """Where the answer goes besides the console, `RUN/gate.json` and `RUN/junit.xml`."""

    junit: Path | None = None
    markdown: Path | None = None
    github: bool = False
    json: bool = False


def judge(run: Path, gate_file: Path, baseline: Path | None, outputs: Outputs) -> GateResult:
    """Judge a run and publish the answer; an error is published too, then raised.

    Raises:
        MismatchProbeError: nothing could be decided.
    """
    if outputs.github:
        summary_path()
    try:
        result = run_gate(run, gate_file, baseline)
    except MismatchProbeError as error:
        publish(refused(error, run, gate_file), outputs)
        raise
    publish(result, outputs)
    return result


def publish(result: GateResult, outputs: Outputs) -> None:
    """Write the answer everywhere it was asked for; the run directory's files only where there is a run."""
    directory = RunDirectory(Path(result.run))
    junit = [outputs.junit] if outputs.junit else []
    if directory.is_run:
        write_text(directory.path / "gate.json", result.model_dump_json(indent=2) + "\n")
        junit.append(directory.path / "junit.xml")
    for path in junit:
        write_junit(path, result)
    if outputs.markdown:
        write_text(outputs.markdown, render_markdown(result))
    if outputs.github:
        append_summary(summary_path(), result)
        for command in annotations(result):
            typer.echo(command, err=True)
    render_gate(result, people())
    if outputs.json:
        print_json(result)


def measure_floor(paths: Sequence[Path], gate_file: Path, *, json_output: bool) -> None:
    """Measure the floor and write it where the gate file says.

    Raises:
        MismatchProbeError: the runs or the gate file cannot be used.
    """
    gate = load_gate(gate_file)
    if gate.settings.floor is None:
        raise UsageError(f'{gate_file} names no floor to write; add floor = "floor.json" under [gate]')
    floor = calibrate(gate, [open_run(path, "the run") for path in paths])
    target = gate_file.parent / gate.settings.floor
    write_floor(target, floor)
    console = people()
    render_floor(floor, console)
    console.print(f"Floor: {target}", soft_wrap=True)
    if json_output:
        print_json(floor)
