"""`mismatch-probe train`."""

from typing import Annotated, Any

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import gives_settings
from mismatch_probe.cli.training_options import TRAINING
from mismatch_probe.errors import ExitCode


@gives_settings(TRAINING)
def train(
    given: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    infer: options.ServerSide = None,
    canary: Annotated[
        bool,
        typer.Option("--canary", help="Train nothing: sync, sample and compare once, and say what guards think of it."),
    ] = False,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Train with reinforcement learning, guarded by the mismatch between vLLM and the training path.

    Engine arguments pass through: --vllm.KEY VALUE. On several GPUs: torchrun --nproc-per-node N -m mismatch_probe
    train …
    """
    given = given | options.server_side(infer)
    if canary:
        from mismatch_probe.cli.train_command import run_canary

        return run_canary(given, config=config, out=out, resume=resume, json_output=json_output)
    from mismatch_probe.cli.train_command import run_train

    return run_train(given, config=config, out=out, resume=resume, json_output=json_output)
