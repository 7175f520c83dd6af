"""`mismatch-probe evaluate`."""

from typing import Any, Final

from mismatch_probe.children.servers import warm_up
from mismatch_probe.cli import options
from mismatch_probe.cli.compare import side_values
from mismatch_probe.cli.options import Flag, gives_settings
from mismatch_probe.config.nested import nested
from mismatch_probe.errors import ExitCode

_PROBLEMS: Final = {
    "task": Flag("prompts.source", options.TASK_HELP, default="sums:medium"),
    "num_problems": Flag(
        "prompts.num_prompts", "How many problems; 256, or all of a smaller source, unless given.", int
    ),
    "reward": Flag("evaluation.reward", options.REWARD_HELP),
    "samples_per_prompt": Flag(
        "sampling.samples_per_prompt", "Responses sampled for each problem; 4 unless given.", int
    ),
    "seed": Flag("sampling.seed", "Seed of problems and sampling.", int, default="0"),
    "sample_pi": Flag("evaluation.sample_pi", "Also sample responses on the training path itself; slower.", bool),
}


@gives_settings(options.MODEL, _PROBLEMS, options.MAX_NEW_TOKENS, options.TEMPERATURE, options.DEVICE)
def evaluate(
    given: dict[str, Any],
    dtype: options.BothDtypes = None,
    train_dtype: options.TrainDtypes = None,
    infer_dtype: options.InferDtypes = None,
    train: options.TrainSides = None,
    infer: options.InferSides = None,
    out: options.Out = None,
    resume: options.Resume = False,
    config: options.Config = None,
    json_output: options.JsonOutput = False,
) -> ExitCode:
    """Accuracy under the engine and under the training policy, for each pair of sides: what deployment loses.

    Engine arguments pass through: --vllm.KEY VALUE.
    """
    flags = given | nested(side_values(dtype, train_dtype, infer_dtype, train, infer))
    warm_up("training", "engine")
    from mismatch_probe.cli.evaluate_command import run_evaluate

    return run_evaluate(flags, config=config, out=out, resume=resume, json_output=json_output)
