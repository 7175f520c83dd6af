"""What `localize` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import tempfile
from pathlib import Path
from typing import Any

from mismatch_probe.cli.output import people, print_json
from mismatch_probe.config.load import merged, parse_settings, read_settings_file
from mismatch_probe.config.localize import LocalizeSettings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.localize.console import render_localization
from mismatch_probe.localize.run import localize
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.run_directory import RunDirectory


def run_localize(flags: dict[str, Any], *, config: Path | None, out: Path | None, json_output: bool) -> ExitCode:
    """Parse, validate, localize, export.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence.
    """
    console = people()
    values = merged({} if config is None else read_settings_file(config), flags)
    if "model" not in values:
        raise UsageError("no model to look into; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(LocalizeSettings, values)
    if out is not None:
        RunDirectory(out).create()
    with tempfile.TemporaryDirectory(dir=out, prefix=".localize-") as folder:
        found = localize(
            settings, Path(folder), lambda line: console.print(line, style="dim", soft_wrap=True, highlight=False)
        )
    if out is not None:
        write_text(out / "localize.json", found.model_dump_json(indent=2) + "\n")
    render_localization(found, console)
    if json_output:
        print_json(found)
    return ExitCode.PASS
