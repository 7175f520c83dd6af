"""`mismatch-probe explain RUN --model CHECKPOINT`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.reading import merge_tables

if TYPE_CHECKING:
    from mismatch_probe.cli.progress import Announcement, ProgressLine
    from mismatch_probe.config.model import LoggedSide
    from mismatch_probe.importing.scoring import ProgressCallback
    from mismatch_probe.records.findings import Explanation
    from mismatch_probe.records.manifest import Manifest
    from mismatch_probe.records.run_directory import RunDirectory

_SAID: Final = {
    "train_dtype": Flag("pi.dtype", "Dtype that the training path computed in."),
    "infer_dtype": Flag("mu.dtype", "Dtype that the engine computed in."),
    "top_p": Flag(
        "mu.top_p",
        "The engine cut the vocabulary to the most probable tokens with this share, and its log-probs are of these.",
        float,
    ),
    "top_k": Flag("mu.top_k", "The same, cut to so many of the most probable tokens.", int),
    "min_p": Flag("mu.min_p", "The same, cut to tokens with this share of the most probable one's probability.", float),
    "adapter": Flag("adapter", "LoRA adapter of both sides: a folder."),
    "device": Flag("device", "auto, cpu, cuda, cuda:1."),
}

_TRIED: Final = "What is tried"
_IDS: Final = re.compile(r"\d+(,\d+)*")
_ADAPTER: Final = "adapter_config.json"
_LONGEST_WAIT_SECONDS: Final = 600.0


@gives_settings(options.MODEL, _SAID)
def explain(
    flag_values: dict[str, Any],
    run: options.ImportedRun,
    step: Annotated[
        int | None,
        typer.Option(help="Explain the responses of this step, whose weights --model has.", rich_help_panel=_TRIED),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Other weights to try, as VERSION=FOLDER (repeatable): a checkpoint or a LoRA adapter.",
            rich_help_panel=_TRIED,
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="A text to try before the prompts (repeatable), or token ids as 1,2,3.", rich_help_panel=_TRIED
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Temperature of both sides' log-probs, by what you know of the system; the import's unless given.",
            rich_help_panel=_TRIED,
        ),
    ] = None,
    num_responses: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="RESPONSES", help="Look at so many responses; 128 unless given.", rich_help_panel=_TRIED
        ),
    ] = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Name the cause of the mismatch in a log: compute each suspected cause with the checkpoint, and compare.

    A side that the log lacks is not explained: `mismatch-probe score` computes it on the log's own token ids.
    """
    options.announce(f"Reading {run}")
    from mismatch_probe.children.servers import warm_up

    warm_up("training")
    from mismatch_probe.records.run_directory import RunDirectory

    if "model" not in flag_values:
        raise UsageError("no model to explain the log with; give --model the checkpoint that sampled its responses")
    directory = RunDirectory(run)
    trial_values = {"weights": [*map(_weights, weights or [])]} | _headers(header or [])
    values = merge_tables(_declared_values(directory.read_manifest(), temperature), flag_values | trial_values)
    explanation, report = file_explanation(directory, values, step, num_responses)
    return show_explanation(explanation, report, json_output=json_output)


def explain_import(
    directory: RunDirectory, model: Mapping[str, Any], step: int | None
) -> tuple[Explanation, Path | None]:
    """`explain RUN` right after the import; `model` is what --model and its like set. Returns and raises as
    `file_explanation`.
    """
    return file_explanation(
        directory, merge_tables(_declared_values(directory.read_manifest(), None), model), step, None
    )


def file_explanation(
    directory: RunDirectory, values: Mapping[str, Any], step: int | None, num_responses: int | None
) -> tuple[Explanation, Path | None]:
    """Explain a log with these settings and file it in its run; the page is None where there are no two sides to show.

    Raises:
        MismatchProbeError: it cannot be done; nothing is filed.
    """
    from mismatch_probe.cli.output import narration
    from mismatch_probe.cli.progress import Announcement, progress_line
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.model import ExplainSettings
    from mismatch_probe.importing.scoring import MOST_RESPONSES, explain_log
    from mismatch_probe.records.findings import Findings, explain_file, require_absent
    from mismatch_probe.report.page import write_report

    settings = parse_settings(ExplainSettings, values)
    name = explain_file(step)
    with directory.reserve(name):
        require_absent(directory.path / name)
        clock = Announcement()
        with progress_line(narration(), clock.remaining, first="loading the checkpoint") as line:
            explanation = explain_log(
                directory, settings, step, num_responses or MOST_RESPONSES, _explain_progress(line, clock)
            )
        with directory.lock(_LONGEST_WAIT_SECONDS):
            Findings(directory.path).write(explanation)
            report = write_report(directory) if directory.summary_path.exists() else None
    return explanation, report


def show_explanation(explanation: Explanation, report: Path | None, *, json_output: bool) -> ExitCode:
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.report.answers.explain import explain_answer
    from mismatch_probe.report.screen import print_answer

    console = results(as_json=json_output)
    print_answer(explain_answer(explanation), console)
    print_outcome(console, report, explanation, as_json=json_output)
    return explanation.exit_code


def _explain_progress(line: ProgressLine, clock: Announcement) -> ProgressCallback:
    from mismatch_probe.report.answers.explain import SIDES

    def tell(side: LoggedSide, number: int, of: int, how_far: str, seconds_left: float | None) -> None:
        clock.hear(seconds_left)
        line.at(f"the {SIDES[side]}'s side", number, of, how_far)

    return tell


def _declared_values(manifest: Manifest, temperature: float | None) -> dict[str, Any]:
    """Both sides as the import says they are."""
    mu, pi = manifest.settings.infer_sides[0], manifest.settings.train_sides[0]
    value = manifest.settings.sampling.temperature if temperature is None else temperature
    return {
        "mu": {"dtype": mu.dtype.value, "temperature": value},
        "pi": {"dtype": pi.dtype.value, "temperature": value},
    }


def _headers(headers: Sequence[str]) -> dict[str, list[Any]]:
    ids = [text for text in headers if _IDS.fullmatch(text)]
    return {
        "headers": [[int(number) for number in text.split(",")] for text in ids],
        "header_texts": [text for text in headers if text not in ids],
    }


def _weights(text: str) -> dict[str, str]:
    version, equals, folder = text.partition("=")
    if not equals or not version or not folder:
        raise UsageError(f"--weights {text!r} is not written as VERSION=FOLDER; write for instance --weights 9=ckpt/9")
    kind = "adapter" if (Path(folder) / _ADAPTER).exists() else "checkpoint"
    return {"version": version, kind: folder}
