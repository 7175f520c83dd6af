"""What `headroom` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from pathlib import Path
from typing import Any

from mismatch_probe.cli.output import people, print_json
from mismatch_probe.config.headroom import HeadroomSettings
from mismatch_probe.config.load import merged, parse_settings, read_settings_file
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.headroom.console import render_headroom
from mismatch_probe.headroom.run import examine
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.run_directory import RunDirectory


def run_headroom(flags: dict[str, Any], *, config: Path | None, out: Path | None, json_output: bool) -> ExitCode:
    """Parse, validate, examine, export.

    Raises:
        MismatchProbeError: anything that stops the examination, as one sentence.
    """
    console = people()
    values = merged({} if config is None else read_settings_file(config), flags)
    if "model" not in values:
        raise UsageError("no model to examine; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(HeadroomSettings, values)
    if out is not None:
        RunDirectory(out).create()
    found = examine(settings, lambda line: console.print(line, style="dim", soft_wrap=True, highlight=False))
    if out is not None:
        write_text(out / "headroom.json", found.model_dump_json(indent=2) + "\n")
    render_headroom(found, console)
    if json_output:
        print_json(found)
    return found.exit_code
