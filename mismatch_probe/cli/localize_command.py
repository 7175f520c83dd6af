"""What `localize` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_probe.children.servers import keep_scratch
from mismatch_probe.cli.filing import Filing
from mismatch_probe.cli.output import narration, print_outcome, results
from mismatch_probe.cli.progress_line import progress_line
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import given_settings, parse_settings
from mismatch_probe.config.localize import LocalizeSettings, localize_values, values_of_pair
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.localize.console import render_localization
from mismatch_probe.localize.run import localize
from mismatch_probe.records.findings import localize_file


def run_localize(
    flags: dict[str, Any],
    *,
    config: Path | None,
    out: Path | None,
    run: Path | None,
    pair: str | None = None,
    json_output: bool,
) -> ExitCode:
    """Parse, validate, localize, export.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence.
    """
    written = given_settings(config, flags)
    filing = Filing.open(out, run, written)
    of_run = localize_values if pair is None else partial(values_of_pair, text=pair)
    values = filing.values(of_run, written)
    if "model" not in values:
        raise UsageError("no model to look into; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(LocalizeSettings, values)
    if filing.settings is not None:
        _require_pair(filing.settings, values)
    with filing.reserved(localize_file(*settings.names)):
        with (
            tempfile.TemporaryDirectory(dir=filing.folder, prefix=".localize-") as folder,
            progress_line(narration()) as line,
        ):
            keep_scratch(Path(folder))
            localization = localize(settings, Path(folder), line.at)
        report = filing.file(localization)
    console = results(as_json=json_output)
    render_localization(localization, console)
    print_outcome(console, report, localization, as_json=json_output)
    return ExitCode.PASS


def _require_pair(run: CompareSettings, values: dict[str, Any]) -> None:
    """One of the run's pairs must be meant, so that no dtype is looked into that nobody asked for."""
    if not {"train_dtype", "infer_dtype"} <= values.keys():
        there = ", ".join(train if train == infer else f"{train}/{infer}" for train, infer in run.pairs)
        raise UsageError(
            f"the run has the pairs {there}; say which with --dtype, --train-dtype and --infer-dtype, or --pair"
        )
