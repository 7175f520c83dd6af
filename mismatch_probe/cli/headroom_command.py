"""What `headroom` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from pathlib import Path
from typing import Any

from mismatch_probe.cli.filing import Filing
from mismatch_probe.cli.output import narration, print_outcome, results
from mismatch_probe.cli.progress_line import progress_line
from mismatch_probe.config.headroom import HeadroomSettings, headroom_values
from mismatch_probe.config.load import given_settings, parse_settings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.headroom.run import measure_headroom
from mismatch_probe.headroom.sentences import render_headroom
from mismatch_probe.records.kinds import HEADROOM_FILE


def run_headroom(
    flags: dict[str, Any], *, config: Path | None, out: Path | None, run: Path | None, json_output: bool
) -> ExitCode:
    """Parse, validate, examine, export.

    Raises:
        MismatchProbeError: anything that stops the examination, as one sentence.
    """
    written = given_settings(config, flags)
    filing = Filing.open(out, run, written)
    values = filing.values(headroom_values, written)
    if "model" not in values:
        raise UsageError("no model to examine; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(HeadroomSettings, values)
    with filing.reserved(HEADROOM_FILE):
        with progress_line(narration()) as line:
            headroom = measure_headroom(settings, line.at)
        report = filing.file(headroom)
    console = results(as_json=json_output)
    render_headroom(headroom, console)
    print_outcome(console, report, headroom, as_json=json_output)
    return headroom.exit_code
