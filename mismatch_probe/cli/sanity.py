"""`mismatch-probe sanity`."""

from typing import Any, Final

from mismatch_probe.cli import options
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.cli.training_options import TRAINING
from mismatch_probe.errors import ExitCode

_PROBLEMS: Final = {
    "candidates": Flag("sanity.candidates", "Most problems of the task to try; 256 unless given.", int),
    "solve_samples": Flag("sanity.solve_samples", "Responses that a candidate is tried with; 40 unless given.", int),
    "keep_low": Flag("sanity.keep_low", "Least solve rate of a kept one; 0.2 unless given.", float),
    "keep_high": Flag("sanity.keep_high", "Highest solve rate of a kept one; 0.8 unless given.", float),
}


@gives_settings(TRAINING, _PROBLEMS)
def sanity(
    given: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    infer: options.ServerSide = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Keep the problems that the model solves now and then, train on them, and pass when it solves over 95 %.

    Exit code 0 when passed, 1 when not. Engine arguments pass through: --vllm.KEY VALUE.
    """
    from mismatch_probe.cli.train_command import run_sanity

    return run_sanity(
        given | options.server_side(infer), config=config, out=out, resume=resume, json_output=json_output
    )
