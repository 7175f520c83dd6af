"""What `explain` does once its flags are parsed; imported only then, because it loads the heavy parts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mismatch_probe.cli.output import narration, print_outcome, results
from mismatch_probe.cli.progress_line import ProgressLine, progress_line
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.model import ExplainSettings
from mismatch_probe.config.nested import merged
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.importing.explaining import MOST_RESPONSES, Tell, explain_log
from mismatch_probe.records.findings import Findings, explain_file, require_absent
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.findings.page import SIDES, render_explanation
from mismatch_probe.report.page import write_report

_IDS = re.compile(r"\d+(,\d+)*")
_ADAPTER = "adapter_config.json"
_LONGEST_WAIT_SECONDS = 600.0


def run_explain_command(
    path: Path,
    flags: dict[str, Any],
    *,
    step: int | None,
    weights: Sequence[str],
    headers: Sequence[str],
    temperature: float | None,
    num_responses: int | None,
    json_output: bool,
) -> ExitCode:
    """Parse, explain, file the result in the run, show it.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence.
    """
    if "model" not in flags:
        raise UsageError("no model to explain the log with; give --model the checkpoint that sampled its responses")
    run = RunDirectory(path)
    tried = {"weights": [*map(_weights, weights)]} | _headers(headers)
    values = merged(_declared(run.read_manifest(), temperature), flags | tried)
    settings = parse_settings(ExplainSettings, values)
    name = explain_file(step)
    with run.reserved(name):
        require_absent(path / name)
        with progress_line(narration(), first="loading the checkpoint") as line:
            explanation = explain_log(run, settings, step, num_responses or MOST_RESPONSES, _telling(line))
        with run.locked(_LONGEST_WAIT_SECONDS):
            Findings(path).write(explanation)
            report = write_report(run) if run.summary_path.exists() else None
    console = results(as_json=json_output)
    render_explanation(explanation, console)
    print_outcome(console, report, explanation, as_json=json_output)
    return explanation.exit_code


def _telling(line: ProgressLine) -> Tell:
    return lambda side, number, of, how_far: line.at(f"the {SIDES[side]}'s side", number, of, how_far)


def _declared(manifest: Manifest, temperature: float | None) -> dict[str, Any]:
    """Both sides as the import says they are."""
    mu, pi = manifest.settings.infer_sides[0], manifest.settings.train_sides[0]
    said = manifest.settings.sampling.temperature if temperature is None else temperature
    return {
        "mu": {"dtype": mu.dtype.value, "temperature": said},
        "pi": {"dtype": pi.dtype.value, "temperature": said},
    }


def _headers(given: Sequence[str]) -> dict[str, list[Any]]:
    ids = [text for text in given if _IDS.fullmatch(text)]
    return {
        "headers": [[int(number) for number in text.split(",")] for text in ids],
        "header_texts": [text for text in given if text not in ids],
    }


def _weights(text: str) -> dict[str, str]:
    version, equals, folder = text.partition("=")
    if not equals or not version or not folder:
        raise UsageError(f"--weights {text!r} is not written as VERSION=FOLDER; write for instance --weights 9=ckpt/9")
    kind = "adapter" if (Path(folder) / _ADAPTER).exists() else "checkpoint"
    return {"version": version, kind: folder}
