"""`mismatch-probe headroom`."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.errors import ExitCode, UsageError

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
    given: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Folder to write headroom.json and report.html into.")] = None,
    run: options.Run = None,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Say whether a checkpoint fits FP16: weights, activations, and the gradients of an RL loss.

    Ends with 0 where it fits, with a loss scale or with modules in FP32 if need be, and with 1 where it does not.
    """
    from mismatch_probe.cli.filing import Filing
    from mismatch_probe.cli.output import narration, print_outcome, results
    from mismatch_probe.cli.progress import progress_line
    from mismatch_probe.config.examinations import HeadroomSettings, headroom_values
    from mismatch_probe.config.load import given_settings, parse_settings
    from mismatch_probe.headroom.run import measure_headroom
    from mismatch_probe.records.kinds import HEADROOM_FILE
    from mismatch_probe.report.answers.headroom import headroom_answer
    from mismatch_probe.report.screen import print_answer

    written = given_settings(config, given)
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
    print_answer(headroom_answer(headroom), console)
    print_outcome(console, report, headroom, as_json=json_output)
    return headroom.exit_code
