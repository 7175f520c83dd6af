"""What takes torch and transformers to be checked of a checkpoint and its prompts: a job, so a command loads neither.

The prompts are read by the command itself, since they can come through a pipe of its own.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Job, run
from mismatch_probe.compare.torchrun import current
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import Attention
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.tasks import Prompt, encode_prompts, tokenizer_for


@dataclass(frozen=True)
class Inputs:
    prompts: list[EncodedPrompt]
    attention: Attention


def checked_inputs(
    settings: CompareSettings, folder: Path, prompts: list[Prompt], vocabulary: int | None, context_length: int | None
) -> Inputs:
    """The prompts as ids, and how the training path will compute; the last two arguments as in `encode_prompts`.

    Raises:
        UsageError: the checkpoint, the prompts or the device cannot be used.
        MissingExtra: a needed package is not installed.
    """
    asked = {
        "folder": str(folder.absolute()),
        "trust_remote_code": settings.model.trust_remote_code,
        "attention": settings.training.attention,
        "device": settings.training.device,
        "ranks_here": _ranks_here(settings),
        "tensor_parallel": _degrees(settings),
        "by_layer": settings.reference.dtype is not None and settings.reference.by_layer is True,
        "chat_template": settings.prompts.chat_template,
        "vocabulary": vocabulary,
        "context_length": context_length,
    }
    job = Job(
        name="checking the checkpoint and the prompts",
        function=f"{__name__}:check",
        arguments=(asked, json.dumps([asdict(prompt) for prompt in prompts], default=str)),
        preload="training",
        when_killed="lower --num-prompts",
    )
    answer = run(job)
    return Inputs([EncodedPrompt(**prompt) for prompt in answer["prompts"]], answer["attention"])


def _degrees(settings: CompareSettings) -> list[int]:
    """The degrees of tensor parallelism in which sides compute the run's checkpoint."""
    of_checkpoint = [side.training for side in settings.train_sides if side.model == settings.model]
    return sorted({training.tensor_parallel for training in of_checkpoint if training is not None})


def _ranks_here(settings: CompareSettings) -> int:
    """How many ranks hold a model on this machine at most; 0 where one process holds each."""
    torchrun = current()
    return max(side.num_ranks for side in settings.train_sides) if torchrun is None else torchrun.ranks_here


def check(send: Send, asked: dict[str, Any], prompts: str) -> dict[str, Any]:
    """What `checked_inputs` asks for, as JSON values."""
    from mismatch_probe.training_path.fit import require_fit, require_layers
    from mismatch_probe.training_path.loading import choose_attention, choose_device, load_config
    from mismatch_probe.training_path.ranks.sharding import require_divisible, require_gpus

    require_gpus(choose_device(asked["device"]), asked["ranks_here"])
    folder, trust_remote_code = Path(asked["folder"]), asked["trust_remote_code"]
    attention = choose_attention(folder, asked["attention"], trust_remote_code=trust_remote_code)
    require_fit(folder, trust_remote_code=trust_remote_code)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    for degree in asked["tensor_parallel"]:
        require_divisible(folder, config, degree)
    if asked["by_layer"]:
        require_layers(folder, config)
    given = [Prompt(**prompt) for prompt in json.loads(prompts)]
    tokenizer = tokenizer_for(given, asked["folder"], trust_remote_code=trust_remote_code)
    encoded = encode_prompts(given, tokenizer, asked["chat_template"], asked["vocabulary"], asked["context_length"])
    return {"prompts": [asdict(prompt) for prompt in encoded], "attention": attention}
