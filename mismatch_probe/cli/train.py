"""`mismatch-probe train`."""

from typing import Annotated, Any

import typer

from mismatch_probe.cli import options
from mismatch_probe.cli.options import gives_settings
from mismatch_probe.cli.training_options import TRAINING


@gives_settings(TRAINING)
def train(
    given: dict[str, Any],
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    canary: Annotated[
        bool,
        typer.Option("--canary", help="Train nothing: sync, sample and compare once, and say what guards think of it."),
    ] = False,
    json_output: options.JsonOutput = False,
) -> None:
    """Train with reinforcement learning, guarded by the mismatch between vLLM and the training path.

    Engine arguments pass through: --vllm.KEY VALUE. On several GPUs: torchrun --nproc-per-node N -m mismatch_probe
    train …
    """
    if canary:
        from mismatch_probe.cli.canary_command import run_canary

        raise typer.Exit(int(run_canary(given, config=config, out=out, resume=resume, json_output=json_output)))
    from mismatch_probe.cli.train_command import run_train

    raise typer.Exit(int(run_train(given, config=config, out=out, resume=resume, json_output=json_output)))
