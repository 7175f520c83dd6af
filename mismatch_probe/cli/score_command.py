"""What `score` does once its flags are parsed; imported only then, because it loads the heavy parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_probe.cli.log_output import show_run, with_dtypes
from mismatch_probe.cli.output import narration
from mismatch_probe.cli.rescoring import rescore_telling
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.importing.scoring import ScoreRequest, open_scoring
from mismatch_probe.records.run_directory import RunDirectory


def run_score(
    imported: Path, out: Path, flags: dict[str, Any], given: Mapping[str, Any], *, json_output: bool
) -> ExitCode:
    """Score, summarise, and show.

    Raises:
        MismatchProbeError: anything that stops it, as one sentence; what was computed stays.
        KeyboardInterrupt: passed on after saying how to continue.
    """
    if "model" not in flags:
        raise UsageError("no model to score with; give --model the checkpoint that sampled these responses")
    run = open_scoring(RunDirectory(imported), out, ScoreRequest(**with_dtypes(given)), flags)
    rescore_telling(run, narration())
    return show_run(run, json_output=json_output)
