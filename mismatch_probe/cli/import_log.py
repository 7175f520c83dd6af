"""`mismatch-probe import SOURCE`, and `mismatch-probe score RUN` on what it made."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import gives_settings
from mismatch_probe.errors import ExitCode, MismatchProbeError, RunDirectoryError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch_probe.cli.progress import ProgressLine
    from mismatch_probe.engines.token_text import TokenTexts
    from mismatch_probe.importing.run import Log
    from mismatch_probe.logs import Format, LogFinding, Source
    from mismatch_probe.logs.choices import ExpertLayout
    from mismatch_probe.logs.metric_files import MetricLog
    from mismatch_probe.records.manifest import LogFile
    from mismatch_probe.records.run_directory import RunDirectory

_SAID_EVERY: Final = 64
_origin_option = partial(typer.Option, rich_help_panel=options.MADE)
_with_model = partial(typer.Option, rich_help_panel=options.SIDES)


@gives_settings(options.MODEL)
def import_log(
    flag_values: dict[str, Any],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A log: a file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="Run directory to make.")],
    format: Annotated[str | None, _origin_option(help=options.LOG_FORMAT_HELP)] = None,
    train_dtype: Annotated[
        str | None, _origin_option(help=f"Dtype that the training path computed in: {options.DTYPES}.")
    ] = None,
    infer_dtype: Annotated[str | None, _origin_option(help="Dtype that the engine computed in.")] = None,
    temperature: Annotated[
        float | None, _origin_option(help="Temperature of both sides' log-probs, where the log does not say it.")
    ] = None,
    ref_is_fp32: Annotated[
        bool,
        _origin_option("--ref-is-fp32", help="The log's reference is the same policy in FP32, not another policy."),
    ] = False,
    step: Annotated[
        int | None,
        _with_model(help="With --model: explain, and score, the responses of this step, whose weights it has."),
    ] = None,
    scored: Annotated[
        Path | None, _with_model(help="With --model: run directory for what the log lacks, computed as `score` does.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Analyse so many sampled tokens, of whole prompts chosen at random."
        ),
    ] = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Make a run directory of a log that another system wrote: `report`, `gate` and `diff` read it.

    With --model, tokens are shown as text and `explain` runs at once. Nothing of the log is run. What it lacks, `score`
    computes on its token ids.
    """
    if "model" not in flag_values and (step is not None or scored is not None):
        raise UsageError("--step and --scored say what is computed with a checkpoint; give --model the log's")
    options.announce(f"Reading {source}")
    from mismatch_probe.cli.output import narration, results, show_run, with_dtypes
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.importing.run import LogSettings, import_log, noise_of_sampler
    from mismatch_probe.inert import command_line
    from mismatch_probe.logs import recognise
    from mismatch_probe.logs.metric_files import metrics_of
    from mismatch_probe.notation import write_count, write_many
    from mismatch_probe.records.files import JOINED_FOLDER, RunKind, kind_of
    from mismatch_probe.records.run_directory import RunDirectory
    from mismatch_probe.report.screen import print_command, print_line

    console = narration()
    flags = {
        "train_dtype": train_dtype,
        "infer_dtype": infer_dtype,
        "temperature": temperature,
        "ref_is_exact": ref_is_fp32,
        "most_tokens": max_tokens,
    }
    settings = LogSettings(**with_dtypes(flags))
    directory = RunDirectory(out)
    if directory.is_run:
        is_unfinished = kind_of(out) == RunKind.IMPORTED and not directory.summary_path.exists()
        how = f", or finish the one there: {directory.how_to_finish()}" if is_unfinished else ""
        raise RunDirectoryError(f"{out} already holds a run, and an import begins anew: give another --out{how}")
    directory.require_free()
    if scored is not None:
        RunDirectory(scored).require_free()
    texts = _texts_by(flag_values)
    if (metrics := metrics_of(source, format)) is not None:
        return _import_metrics(metrics, source, directory, flag_values, json_output=json_output)
    log_format = recognise(source, format)
    print_line(console, f"Format: {log_format.title}")
    if log_format.prompts is not None:
        return _import_prompts(log_format, source, out, results(as_json=json_output))
    try:
        with progress_line(console) as line:
            count = _Count(line, log_format.sources(source))
            run = import_log(
                _log(log_format, source, count), settings, out, count.add, count.end, texts, *_facts_by(flag_values)
            )
    except (KeyboardInterrupt, MismatchProbeError):
        if RunDirectory(out).is_run:
            print_line(console, "What was imported is kept. Continue with:")
            print_command(console, command_line("report", out, "--recompute"))
        raise
    console = results(as_json=json_output)
    manifest = run.read_manifest()
    origin = manifest.log
    assert origin is not None
    print_line(
        console,
        f"{write_many(origin.num_responses, 'response')}, {write_many(origin.num_tokens, 'token')} in all, "
        f"{write_count(origin.num_sampled_tokens)} sampled by the policy; analysed: "
        f"{write_many(origin.analysed_responses, 'response')}, {write_many(origin.analysed_tokens, 'token')}",
    )
    for note in origin.notes:
        print_line(console, f"{note.level}: {note.sentence}")
    if origin.turns is not None and origin.turns.num_joined and not run.summary_path.exists():
        turns = write_many(origin.turns.num_joined, "turn")
        print_line(
            console,
            f"{run.path / JOINED_FOLDER}: {turns} behind a break, as a trainer has them that joins the turns. What "
            "that costs:",
        )
        measure = ("--out", "JOINED", "--model", "CHECKPOINT", "--scored", "SCORED")
        print_command(console, command_line("import", run.path / JOINED_FOLDER, *measure))
    for name, what in origin.assumed.items():
        print_line(console, f"assumed: {name.replace('_', ' ')} {what}")
    if "model" in flag_values:
        return _with_checkpoint(run, flag_values, step, scored, json_output=json_output)
    if not run.summary_path.exists():
        if noise := noise_of_sampler(run, manifest):
            print_line(console, f"noise: {noise}")
        print_line(
            console, "The log has no log-probs of the training path, so there is nothing to compare yet. Compute them:"
        )
        print_command(console, command_line("score", run.path, "--model", "CHECKPOINT", "--out", "SCORED"))
        return ExitCode.INCONCLUSIVE
    return show_run(run, json_output=json_output)


def _import_metrics(
    metrics: MetricLog, source: Path, directory: RunDirectory, flag_values: Mapping[str, Any], *, json_output: bool
) -> ExitCode:
    """What metrics alone tell, in a folder with its page.

    Raises:
        UsageError: a checkpoint is given, with which nothing can be computed.
        StorageError: the disk refused.
    """
    from mismatch_probe.cli.output import print_outcome, results
    from mismatch_probe.importing.metrics import reading_of_metrics
    from mismatch_probe.records.lines import CurvesDirectory
    from mismatch_probe.report.answers.curves import curves_answer
    from mismatch_probe.report.page import write_curves_report
    from mismatch_probe.report.screen import print_answer

    if "model" in flag_values:
        raise UsageError(
            f"{source} holds metrics and no token, so a checkpoint has nothing to score; leave --model out"
        )
    reading = reading_of_metrics(source, metrics)
    folder = CurvesDirectory(directory.path)
    folder.write(reading)
    path = write_curves_report(folder)
    console = results(as_json=json_output)
    print_answer(curves_answer(reading), console)
    print_outcome(console, path, reading, as_json=json_output)
    return reading.exit_code


def _texts_by(flag_values: Mapping[str, Any]) -> TokenTexts:
    """The texts of tokens by the tokenizer of --model, if it is given and has one; found out before the log is read.

    Raises:
        UsageError: there is no such checkpoint, or its tokenizer cannot be read.
    """
    from mismatch_probe.engines.token_text import TokenTexts

    if "model" not in flag_values:
        return TokenTexts(None)
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.model import ModelSettings
    from mismatch_probe.provenance.checkpoint import has_tokenizer
    from mismatch_probe.tasks import load_tokenizer, resolve_model

    model = parse_settings(ModelSettings, flag_values["model"])
    folder = resolve_model(model)
    if not has_tokenizer(folder):
        return TokenTexts(None)
    return TokenTexts(load_tokenizer(folder, trust_remote_code=model.trust_remote_code))


def _facts_by(flag_values: Mapping[str, Any]) -> tuple[ExpertLayout | None, frozenset[int]]:
    """What the checkpoint of --model says of experts, None of a dense model, and at which ids it stops.

    Raises:
        UsageError: there is no such checkpoint, or its configuration cannot be read.
    """
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.config.model import ModelSettings
    from mismatch_probe.logs.choices import ExpertLayout
    from mismatch_probe.provenance.checkpoint import end_token_ids, read_config
    from mismatch_probe.tasks import resolve_model

    if "model" not in flag_values:
        return None, frozenset()
    folder = resolve_model(parse_settings(ModelSettings, flag_values["model"]))
    return ExpertLayout.of(read_config(folder)), end_token_ids(folder, None)


def _with_checkpoint(
    run: RunDirectory, model: Mapping[str, Any], step: int | None, scored: Path | None, *, json_output: bool
) -> ExitCode:
    """What a log says with its checkpoint: explained, and scored where a place for that is given.

    Raises:
        MismatchProbeError: it cannot be computed; what was imported is kept.
    """
    from mismatch_probe.children.servers import warm_up
    from mismatch_probe.cli.explain import explain_import, show_explanation
    from mismatch_probe.cli.output import narration, rescore_with_progress, results, show_run
    from mismatch_probe.importing.scoring import ScoreRequest, open_scoring
    from mismatch_probe.inert import command_line
    from mismatch_probe.report.answers.explain import experts_sentence
    from mismatch_probe.report.screen import print_command, print_line

    warm_up("training", *(() if scored is None else ("engine",)))
    try:
        explanation, report = explain_import(run, model, step)
    except (KeyboardInterrupt, MismatchProbeError) as error:
        of_step = () if step is None or "--step" in str(error) else ("--step", step)
        is_of_model = isinstance(error, UsageError) and "--model" in str(error)
        checkpoint = "CHECKPOINT" if is_of_model else model["model"].get("path")
        go_on = command_line("explain", run.path, "--model", checkpoint, *of_step)
        print_line(narration(), "What was imported is kept. Continue with:")
        print_command(narration(), go_on)
        raise
    if explanation.experts is not None:
        print_line(results(as_json=json_output), f"experts: {experts_sentence(explanation.experts)}")
    if scored is not None:
        scored_run = open_scoring(run, scored, ScoreRequest(step=step), dict(model))
        rescore_with_progress(scored_run, narration())
        return show_run(scored_run, json_output=json_output)
    if run.summary_path.exists():
        return show_run(run, json_output=json_output)
    return show_explanation(explanation, report, json_output=json_output)


def _import_prompts(log_format: Format, source: Path, out: Path, console: Console) -> ExitCode:
    """What a log of texts is good for."""
    from mismatch_probe.importing.rows import write_prompts
    from mismatch_probe.inert import command_line
    from mismatch_probe.notation import write_many
    from mismatch_probe.report.screen import print_command, print_line

    findings: list[LogFinding] = []
    path, count = write_prompts(log_format, source, out, findings)
    for finding in findings:
        print_line(console, f"{finding.level}: {finding.sentence}")
    print_line(
        console,
        f"Nothing of it can be compared: {log_format.why_not}. "
        f"Its {write_many(count, 'prompt')} {'is' if count == 1 else 'are'} in {path}; ask again:",
    )
    print_command(console, command_line("compare", "--model", "CHECKPOINT", "--prompts", path))
    return ExitCode.INCONCLUSIVE


def _log(log_format: Format, source: Path, count: _Count) -> Log:
    from mismatch_probe.importing.run import Log

    findings: list[LogFinding] = []
    return Log(
        source=str(source),
        format=log_format.name,
        files=[_file(file) for file in count.files],
        responses=log_format.read(source, findings.append, count.begin_file),
        findings=lambda: findings,
    )


def _file(source: Source) -> LogFile:
    from mismatch_probe.records.manifest import LogFile

    modified_at = datetime.fromtimestamp(source.modified, UTC).isoformat(timespec="seconds")
    return LogFile(
        path=str(source.path),
        size_bytes=source.num_bytes,
        modified_at=modified_at,
        step=source.step,
        complete=source.complete,
    )


class _Count:
    """How many files, responses and tokens were read, for the line, and how long the other files will take.

    A file is predicted by the seconds that the files before it took a byte.
    """

    def __init__(self, line: ProgressLine, files: Sequence[Source]) -> None:
        self.files = files
        self._line = line
        self._num_bytes = sum(file.num_bytes for file in files)
        self._responses = self._tokens = self._files_begun = self._bytes_begun = 0
        self._began = time.monotonic()
        self._seconds = 0.0
        """Predicted, of all files; 0 until one was read."""
        line.begin("reading the log")

    def begin_file(self) -> None:
        if self._bytes_begun:
            self._seconds = (time.monotonic() - self._began) / self._bytes_begun * self._num_bytes
        self._bytes_begun += self.files[self._files_begun].num_bytes
        self._files_begun += 1

    def add(self, num_tokens: int) -> None:
        self._responses += 1
        self._tokens += num_tokens
        if self._responses % _SAID_EVERY == 0:
            self._line.go_on(", ".join(self._how_far()))

    def _how_far(self) -> Iterator[str]:
        from mismatch_probe.cli.progress import time_left
        from mismatch_probe.notation import write_count, write_many

        if len(self.files) > 1:
            yield f"file {write_count(self._files_begun)} of {write_count(len(self.files))}"
        if self._seconds:
            yield time_left(max(self._seconds - (time.monotonic() - self._began), 0))
        yield write_many(self._responses, "response")
        yield write_many(self._tokens, "token")

    def end(self) -> None:
        self._line.begin("statistics and verdict")


@gives_settings(options.MODEL, options.ATTENTION, options.DEVICE)
def score(
    flag_values: dict[str, Any],
    run: options.ImportedRun,
    out: Annotated[Path, typer.Option(help="Run directory to make, or to continue.")],
    step: Annotated[
        int | None,
        typer.Option(
            help="Score the responses of this step, whose weights --model has.", rich_help_panel=options.SIDES
        ),
    ] = None,
    train_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype that the training path computes in; the log's unless given.", rich_help_panel=options.SIDES
        ),
    ] = None,
    infer_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype that the engine computes in; the log's unless given.", rich_help_panel=options.SIDES),
    ] = None,
    no_engine: Annotated[
        bool,
        typer.Option(
            "--no-engine", help="Compute the training path and the reference alone.", rich_help_panel=options.COMPUTED
        ),
    ] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Compute what an imported log lacks, on its own token ids: the training path, the engine, the FP32 reference.

    Nothing is sampled. Engine arguments pass through: --vllm.KEY VALUE.
    """
    from mismatch_probe.children.servers import warm_up

    warm_up("training", *(() if no_engine else ("engine",)))
    from mismatch_probe.cli.output import narration, rescore_with_progress, show_run, with_dtypes
    from mismatch_probe.importing.scoring import ScoreRequest, open_scoring
    from mismatch_probe.records.run_directory import RunDirectory

    if "model" not in flag_values:
        raise UsageError("no model to score with; give --model the checkpoint that sampled these responses")
    dtypes = with_dtypes({"train_dtype": train_dtype, "infer_dtype": infer_dtype})
    request = ScoreRequest(**dtypes, with_engine=not no_engine, step=step)
    scored = open_scoring(RunDirectory(run), out, request, flag_values)
    rescore_with_progress(scored, narration())
    return show_run(scored, json_output=json_output)
