"""`mismatch-probe headroom`, `localize` and `audit`: a checkpoint, or a server of it, is examined alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode, MismatchProbeError, UsageError
from mismatch_probe.reading import nest_names

if TYPE_CHECKING:
    from mismatch_probe.cli.output import Filing
    from mismatch_probe.compare.cost.headroom import HeadroomForecast
    from mismatch_probe.config.comparison import CompareSettings
    from mismatch_probe.records.examinations import Headroom
    from mismatch_probe.records.run_directory import RunDirectory


_LOOK: Final = {
    "num_prompts": Flag("prompts.num_prompts", "How many prompts to use; 16 unless given.", int),
    "modules": Flag("modules", "Look into every module, not only every block.", bool),
    "no_interventions": Flag(
        "interventions", "Find only where errors enter, not what fixes them.", bool, turns_off=True
    ),
    "switches": Flag(
        "switches", "Also restart the engine in other ways: compiled, chunked prefill; on CUDA more.", bool
    ),
}


@gives_settings(
    options.MODEL,
    options.PROMPTS,
    options.MAX_NEW_TOKENS,
    options.SEED,
    _LOOK,
    options.ATTENTION,
    options.DEVICE,
)
def localize(
    flag_values: dict[str, Any],
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Both sides in this dtype: {options.DTYPES}; bf16 unless given.", rich_help_panel=options.SIDES
        ),
    ] = None,
    train_dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype that the training path computes in; bf16 unless given.", rich_help_panel=options.SIDES
        ),
    ] = None,
    infer_dtype: Annotated[
        str | None,
        typer.Option(help="Dtype that the engine computes in; bf16 unless given.", rich_help_panel=options.SIDES),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write localize-TRAIN-INFER.json and report.html into.")
    ] = None,
    run: options.Run = None,
    pair: Annotated[
        str | None,
        typer.Option(
            help="Two sides of --run by their names, with their own settings: TRAIN/INFER.",
            rich_help_panel=options.SIDES,
        ),
    ] = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Find the layer, and with --modules the operation, where vLLM and the training path differ, and what fixes it.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    if dtype is not None and (train_dtype is not None or infer_dtype is not None):
        raise UsageError("--dtype sets both sides; give either --dtype, or --train-dtype with --infer-dtype")
    if pair is not None and (run is None or dtype or train_dtype or infer_dtype):
        raise UsageError("--pair names two sides of --run, which have their dtypes; give --run, and no dtype")
    flags = flag_values | nest_names({"train_dtype": train_dtype or dtype, "infer_dtype": infer_dtype or dtype})
    from mismatch_probe.children.servers import keep_scratch, warm_up

    warm_up("training", "engine")
    from tempfile import TemporaryDirectory

    from mismatch_probe.cli.output import Filing, narration, print_outcome, results
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.config.examinations import LocalizeSettings, localize_values, values_of_pair
    from mismatch_probe.config.load import given_settings, parse_settings
    from mismatch_probe.localize.run import localize
    from mismatch_probe.records.findings import localize_file
    from mismatch_probe.report.answers.localize import localize_answer
    from mismatch_probe.report.screen import print_answer

    given_values = given_settings(config, flags)
    filing = Filing.open(out, run, given_values)
    of_run = localize_values if pair is None else partial(values_of_pair, text=pair)
    values = filing.values(of_run, given_values)
    if "model" not in values:
        raise UsageError("no model to look into; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(LocalizeSettings, values)
    if filing.settings is not None:
        _require_pair(filing.settings, values)
    with filing.reserve(localize_file(*settings.names)):
        with (
            TemporaryDirectory(dir=filing.folder, prefix=".localize-") as folder,
            progress_line(narration()) as line,
        ):
            keep_scratch(Path(folder))
            localization = localize(settings, Path(folder), line.at)
        report = filing.file(localization)
    console = results(as_json=json_output)
    print_answer(localize_answer(localization), console)
    print_outcome(console, report, localization, as_json=json_output)
    return ExitCode.PASS


def _require_pair(run: CompareSettings, values: dict[str, Any]) -> None:
    """One of the run's pairs must be meant, so that no dtype is looked into that nobody asked for."""
    if not {"train_dtype", "infer_dtype"} <= values.keys():
        pairs = ", ".join(train if train == infer else f"{train}/{infer}" for train, infer in run.pairs)
        raise UsageError(
            f"the run has the pairs {pairs}; say which with --dtype, --train-dtype and --infer-dtype, or --pair"
        )


_EXAMINATION: Final = {
    "num_prompts": Flag("prompts.num_prompts", "How many prompts to use; 8 unless given.", int),
    "temperature": Flag("sampling.temperature", "Sampling temperature.", float, default="1"),
    "reward": Flag("reward", options.REWARD_HELP),
    "objective": Flag("objective.name", "Whose gradient: grpo, dr-grpo, reinforce, gspo, …", default="grpo"),
    "attention": Flag(
        "attention", "Attention of the FP16 runs: sdpa, eager, flash_attention_2; as `train` unless given."
    ),
    "device": Flag("device", "auto, cpu, cuda, cuda:1.", default="auto"),
    "batch_tokens": Flag("batch_tokens", "Tokens of one forward pass, padding included.", int, default="1024"),
    "weights_only": Flag("weights_only", "Scan the stored weights, of any size, and run nothing.", bool),
}


@gives_settings(
    options.MODEL,
    options.unless_given(options.PROMPTS, prompts="sums:medium"),
    options.unless_given(options.SAMPLES_PER_PROMPT, samples_per_prompt="4"),
    options.unless_given(options.MAX_NEW_TOKENS, max_new_tokens="128"),
    options.SEED,
    _EXAMINATION,
)
def headroom(
    flag_values: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder to write headroom.json and report.html into.")] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Say whether a checkpoint fits FP16: weights, activations, and the gradients of an RL loss.

    Ends with 0 where it fits, with a loss scale or with modules in FP32 if need be, with 1 where it does not, and with
    3 where the responses leave no gradient to measure.
    """
    from mismatch_probe.cli.output import Filing, print_outcome, results
    from mismatch_probe.config.load import given_settings
    from mismatch_probe.report.answers.headroom import headroom_answer
    from mismatch_probe.report.screen import print_answer

    given_values = given_settings(config, flag_values)
    headroom, report = _filed_headroom(Filing.open(out, run, given_values), given_values)
    console = results(as_json=json_output)
    print_answer(headroom_answer(headroom), console)
    print_outcome(console, report, headroom, as_json=json_output)
    return headroom.exit_code


def examine_run(run: RunDirectory, forecast: HeadroomForecast | None = None) -> str | None:
    """Examine the checkpoint of a comparison for FP16 and file that with the run, unless it is filed already.

    forecast: how long that will take, where it is known; the progress has it until something was timed.

    Returns:
        Where the checkpoint cannot be examined, the sentence that says so and why; the run is as it was.
    """
    from mismatch_probe.cli.output import Filing
    from mismatch_probe.cli.progress import number_of_later_part
    from mismatch_probe.inert import command_line
    from mismatch_probe.records.findings import Findings

    if Findings(run.path).headroom() is not None:
        return None
    trust = run.read_manifest().settings.model.trust_remote_code
    given_values = {"model": {"trust_remote_code": True}} if trust else {}
    try:
        _filed_headroom(Filing.open(None, run.path, given_values), given_values, forecast, number_of_later_part(run))
    except MismatchProbeError as error:
        retry = command_line("headroom", "--run", run.path)
        return f"Train in FP16: undecided, headroom could not examine the checkpoint: {error}. To try again: `{retry}`"
    return None


def _filed_headroom(
    filing: Filing, given_values: dict[str, Any], forecast: HeadroomForecast | None = None, part: int | None = None
) -> tuple[Headroom, Path | None]:
    """What was found of a checkpoint, and the page that shows it.

    given_values: the settings that were given. part: the number of this part of a command that does more, its last one.
    """
    from mismatch_probe.cli.output import narration
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.compare.cost.headroom import HeadroomClock
    from mismatch_probe.config.examinations import HeadroomSettings, headroom_values
    from mismatch_probe.config.load import parse_settings
    from mismatch_probe.headroom.run import measure_headroom
    from mismatch_probe.records.files import HEADROOM_FILE

    values = filing.values(headroom_values, given_values)
    if "model" not in values:
        raise UsageError("no model to examine; give --model FOLDER, a hub id, or `--model demo`")
    settings = parse_settings(HeadroomSettings, values)
    with filing.reserve(HEADROOM_FILE):
        clock = HeadroomClock(forecast)
        with progress_line(narration(), clock.remaining) as line:

            def tell(doing: str, number: int, of: int, detail: str) -> None:
                if part is None:
                    line.at(doing, number, of, detail)
                else:
                    line.at(f"headroom, {doing}", part, part, detail)

            headroom = measure_headroom(settings, tell, clock)
        return headroom, filing.file(headroom)


_SERVER: Final = {
    "server": Flag("server.url", "Address of the server: http://HOST:PORT."),
    "served_model": Flag("server.model", "Name to ask for, where several models are served."),
    "chat": Flag("server.chat", "Send messages, which the server puts into its own chat template.", bool),
    "concurrency": Flag("server.concurrency", "Requests in flight at once.", int, default="16"),
    "key_variable": Flag("server.key_variable", "Environment variable that holds the server's key."),
}
_SAID: Final = {
    "dtype": Flag("dtype", "The dtype that the server should compute in.", default="bf16"),
    "adapter": Flag("server.adapter", "LoRA adapter that the server should serve: a folder."),
}
_SAMPLING: Final = {
    "num_prompts": Flag("prompts.num_prompts", "How many prompts to use; 32 unless given.", int),
    "temperature": Flag("sampling.temperature", "Temperature to ask for; 0 is greedy decoding.", float, default="0"),
    "top_p": Flag("sampling.top_p", "Top-p to ask for.", float, default="1"),
    "top_k": Flag("sampling.top_k", "Top-k to ask for; 0 is none.", int, default="0"),
    "noise": Flag(
        "sampling.noise",
        "What noise a seed of the server stands for: vllm-cpu, by which each token is predicted, or unknown.",
        default="unknown",
    ),
    "ignore_eos": Flag("sampling.ignore_eos", "Go on behind the end of sequence.", bool),
}
_COMPUTED: Final = {
    "device": Flag("device", "Device that the checkpoint is computed on: auto, cpu, cuda, cuda:1.", default="auto"),
    "batch_tokens": Flag("batch_tokens", "Tokens of one forward pass, padding included.", int, default="2048"),
}


@gives_settings(
    options.MODEL,
    _SERVER,
    _SAID,
    options.PROMPTS,
    _SAMPLING,
    options.SAMPLES_PER_PROMPT,
    options.unless_given(options.MAX_NEW_TOKENS, max_new_tokens="128"),
    options.SEED,
    _COMPUTED,
)
def audit(
    flag_values: dict[str, Any],
    header: Annotated[
        list[str] | None,
        typer.Option(
            help="A text, such as a system prompt, that the server may put before prompts (repeatable).",
            rich_help_panel=options.SIDES,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write audit.json and report.html into.")] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Say whether a server that gives no log-probs serves what it should, by the tokens that it samples.

    Ends with 0 where the tokens are as declared, with 1 where they are not, and with 3 where they do not tell.
    """
    from mismatch_probe.audit.run import audit_server
    from mismatch_probe.cli.output import Filing, narration, print_outcome, results
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.config.examinations import AuditSettings, audit_values
    from mismatch_probe.config.load import given_settings, parse_settings
    from mismatch_probe.records.files import AUDIT_FILE
    from mismatch_probe.report.answers.audit import audit_answer
    from mismatch_probe.report.screen import print_answer

    given_values = given_settings(config, flag_values)
    filing = Filing.open(out, run, given_values)
    values = filing.values(audit_values, given_values)
    if "model" not in values:
        raise UsageError("no model to hold the tokens against; give --model the checkpoint that should be served")
    if "url" not in values.get("server", {}):
        raise UsageError("no server to audit; give --server http://HOST:PORT")
    settings = parse_settings(AuditSettings, values | ({"headers": header} if header else {}))
    with filing.reserve(AUDIT_FILE):
        with progress_line(narration()) as line:
            document = audit_server(settings, line.at)
        report = filing.file(document)
    console = results(as_json=json_output)
    print_answer(audit_answer(document), console)
    print_outcome(console, report, document, as_json=json_output)
    return document.exit_code
