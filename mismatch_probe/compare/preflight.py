"""Checks before anything starts of what would otherwise fail only after hours of work.

The command itself reads the prompts, since they can come through its own pipe.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children.job import JobFunction
from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Job, run
from mismatch_probe.compare.cost.roofline import Architecture, Architectures, Calibration, ProcessName
from mismatch_probe.compare.torchrun import current
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import Attention, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import check_engine, with_typed_arguments, without_defaults
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.images import images_of, processor_facts
from mismatch_probe.records.manifest import ImagesInPrompts
from mismatch_probe.records.sequences import EncodedPrompt, PromptImages
from mismatch_probe.tasks import Prompt, encode_prompts, tokenizer_for


@dataclass(frozen=True)
class Inputs:
    prompts: list[EncodedPrompt]
    attention: Attention
    architectures: Architectures
    images: ImagesInPrompts | None = None


def checked_inputs(
    settings: CompareSettings,
    folders: Mapping[str, Path],
    prompts: list[Prompt],
    vocabulary: int | None,
    context_length: int | None,
) -> Inputs:
    """The prompts as ids, how the training path will compute, and what each checkpoint's forward pass computes.

    folders: of the run's checkpoint and of those that sides load instead, by the path that they name. The last two
    arguments are as in `encode_prompts`.
    """
    question = {
        "folder": str(folders[settings.model.path].absolute()),
        "folders": [str(folder.absolute()) for folder in folders.values()],
        "trust_remote_code": settings.model.trust_remote_code,
        "attention": settings.training.attention,
        "device": settings.training.device,
        "ranks_here": _ranks_here(settings),
        "tensor_parallel": _degrees_of_parallelism(settings),
        "by_layer": settings.reference.dtype is not None and settings.reference.by_layer is True,
        "chat_template": settings.prompts.chat_template,
        "vocabulary": vocabulary,
        "context_length": context_length,
    }
    job = Job(
        name="checking the checkpoint and the prompts",
        function=check,
        arguments=(question, json.dumps([asdict(prompt) for prompt in prompts], default=str)),
        preload="training",
        when_killed="lower --num-prompts",
    )
    answer = run(job)
    images = answer["images"]
    return Inputs(
        images=None if images is None else ImagesInPrompts(**images),
        prompts=[_prompt_of(prompt) for prompt in answer["prompts"]],
        attention=answer["attention"],
        architectures=Architectures.of_count(folders, answer["count"]),
    )


def _prompt_of(values: dict[str, Any]) -> EncodedPrompt:
    images = values.pop("images")
    return EncodedPrompt(**values, images=None if images is None else PromptImages(**images))


def _degrees_of_parallelism(settings: CompareSettings) -> list[int]:
    """The degrees of tensor parallelism of the sides that compute the run's checkpoint."""
    of_checkpoint = [side.training for side in settings.train_sides if side.model == settings.model]
    return sorted({training.tensor_parallel for training in of_checkpoint if training is not None})


def _ranks_here(settings: CompareSettings) -> int:
    """The largest number of ranks that hold a model on this machine; 0 where one process holds each model."""
    torchrun = current()
    return max(side.num_ranks for side in settings.train_sides) if torchrun is None else torchrun.ranks_here


def check(send: Send, question: dict[str, Any], prompts: str) -> dict[str, Any]:
    """The job of `checked_inputs`; its result is JSON."""
    from mismatch_probe.training_path import timing
    from mismatch_probe.training_path.fit import require_fit, require_layers
    from mismatch_probe.training_path.loading import choose_attention, choose_device, load_config, require_sight
    from mismatch_probe.training_path.rank_sharding import require_divisible, require_gpus

    require_gpus(choose_device(question["device"]), question["ranks_here"])
    folder, trust_remote_code = Path(question["folder"]), question["trust_remote_code"]
    attention = choose_attention(folder, question["attention"], trust_remote_code=trust_remote_code)
    require_fit(folder, trust_remote_code=trust_remote_code)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    for degree in question["tensor_parallel"]:
        require_divisible(folder, config, degree)
    if question["by_layer"]:
        require_layers(folder, config)
    checked_prompts = [Prompt(**prompt) for prompt in json.loads(prompts)]
    with_image = next((prompt for prompt in checked_prompts if prompt.images), None)
    if with_image is not None:
        require_sight(folder, config, with_image.label)
    tokenizer = tokenizer_for(checked_prompts, question["folder"], trust_remote_code=trust_remote_code)
    encoded_prompts = encode_prompts(
        checked_prompts,
        tokenizer,
        question["chat_template"],
        question["vocabulary"],
        question["context_length"],
        folder,
    )
    return {
        "prompts": [asdict(prompt) for prompt in encoded_prompts],
        "images": _images_of_prompts(folder, encoded_prompts),
        "attention": attention,
        "count": timing.count(question["folders"], trust_remote_code),
    }


def _images_of_prompts(folder: Path, prompts: Sequence[EncodedPrompt]) -> dict[str, Any] | None:
    images = images_of(prompts)
    if not images:
        return None
    return {
        "num_prompts": len(images),
        "num_images": sum(len(each.paths) for each in images),
        "num_tokens": sum(each.num_tokens for each in images),
        "processor": processor_facts(folder),
    }


_FLASH_ATTENTION: Final = ("flash_attn", "kernels")
"""The packages that give transformers flash attention."""

_GENERAL_DEVICES: Final = ("auto", "cpu")
"""The devices that are checked without torch, whose import takes seconds."""

_DEVICE_MAP: Final = re.compile(r"auto|balanced|balanced_low_0|sequential|cpu|cuda(:\d+)?")


def with_typed_engines(settings: CompareSettings) -> CompareSettings:
    """The settings with the engine arguments of every side as a run records them.

    An argument with the engine's default value is removed, since it makes no different side; it stays where it
    overrides an argument of the run.
    """
    engine = without_defaults(with_typed_arguments(settings.engine, settings.engine.name), settings.engine.name)
    infer = []
    for side in settings.infer:
        name = side.merge_into(engine).name
        try:
            infer.append(without_defaults(with_typed_arguments(side, name), name, run_arguments=engine.args))
        except UsageError as error:
            raise UsageError(f"--infer {side.name}: {str(error).replace('--vllm.', '')}") from error
    return settings.model_copy(update={"engine": engine, "infer": tuple(infer)})


def check_sides(settings: CompareSettings) -> None:
    """Refuse settings that are not usable on this machine with any checkpoint.

    Raises:
        UsageError: the engine has no such dtype or cannot sample so, a server is to be sent weights, the device is not
            there, the device map is none, or the attention does not run on it or in a format asked for.
        MissingExtra: the attention is not installed.
    """
    for mu in settings.infer_sides:
        assert mu.engine is not None
        check_engine(mu.dtype, settings.sampling, mu.engine)
        if mu.engine.is_remote and mu.engine.args.get("transfer") is not None:
            raise UsageError(
                f"--infer {mu.name}: transfer is how train sends a server weights, and its own are compared; leave it "
                "out"
            )
    for pi in settings.train_sides:
        assert pi.training is not None
        _require_ranks(pi.training)
        _require_training_device(pi.dtype, pi.training)


def _require_training_device(dtype: Dtype, training: TrainingPathSettings) -> None:
    if training.attention == "flash_attention_2" and _device_type(training.device) == "cpu":
        raise UsageError("flash_attention_2 needs a GPU, and the training path runs on the CPU; give --attention sdpa")
    if training.device not in _GENERAL_DEVICES:
        _device_type(training.device)
    if training.attention == "flash_attention_2" and not dtype.is_autocast_target:
        raise UsageError(
            f"flash_attention_2 runs in 16 bit alone, and the training path is to run in {dtype} too; "
            "give --attention sdpa, or --dtype bf16 and --dtype fp16 alone"
        )
    if training.attention == "flash_attention_2" and not any(map(find_spec, _FLASH_ATTENTION)):
        raise MissingExtra(
            "flash_attention_2 needs the package flash-attn, which is not installed; run `pip install flash-attn`, "
            "or give --attention sdpa"
        )
    if training.device_map is not None and not _DEVICE_MAP.fullmatch(training.device_map):
        raise UsageError(
            f"training.device_map {training.device_map!r} cannot be used; set it to auto, balanced, balanced_low_0, "
            "sequential or a device such as cuda:1"
        )
    if training.precision == "fsdp" and training.device_map is not None:
        raise UsageError("training.precision = fsdp places the weights itself; leave training.device_map unset")


def _require_ranks(training: TrainingPathSettings) -> None:
    if training.num_ranks is None:
        return
    if training.device_map is not None:
        raise UsageError("ranks place the weights themselves; leave training.device_map unset, or ranks")
    if training.num_ranks > 1 and ":" in training.device:
        raise UsageError(
            f"training.device {training.device} is one GPU, and each of {training.num_ranks} ranks takes its own; set "
            "it to auto, cuda or cpu"
        )
    if training.adapter is not None:
        raise UsageError(
            "an adapter cannot be computed over ranks; give a checkpoint that it is merged into, or leave ranks unset"
        )
    if training.tensor_parallel > 1 and training.precision == "fsdp":
        raise UsageError("precision = fsdp divides no product; leave tensor_parallel unset, or set precision = weights")
    if training.lm_head_dtype is not None and training.precision != "fsdp":
        raise UsageError("over ranks lm_head_dtype goes with precision = fsdp alone; set that, or leave it unset")


def _device_type(name: str) -> str:
    from mismatch_probe.training_path.loading import choose_device

    return choose_device(name).type


def count(folders: Mapping[str, str], *, trust_remote_code: bool = False) -> Architectures:
    """What the forward pass of each checkpoint computes."""
    answer = run(_job("counting what the model computes", _count, (list(folders.values()), trust_remote_code)))
    return Architectures.of_count(folders, answer)


def measure(
    architecture: Architecture, kinds: Sequence[tuple[ProcessName, Dtype]], training_device: str, folder: str
) -> Calibration:
    """Rates of each process and dtype, and of reading a checkpoint's folder; the engine's are those of the GPU where
    PyTorch sees one.
    """
    arguments = (asdict(architecture), [list(kind) for kind in kinds], training_device, folder)
    return Calibration.model_validate(run(_job("measuring how fast this machine is", _measure, arguments)))


def _job(name: str, function: JobFunction, arguments: tuple[Any, ...]) -> Job:
    return Job(name, function, arguments, preload="training", when_killed="free some and try again")


def _count(send: Send, *arguments: Any) -> dict[str, Any]:
    from mismatch_probe.training_path.timing import count

    return count(*arguments)


def _measure(send: Send, *arguments: Any) -> dict[str, Any]:
    from mismatch_probe.training_path.timing import measure

    return measure(*arguments)
