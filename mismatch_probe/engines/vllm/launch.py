"""How `vllm.LLM` is rehearsed and called: its processes, the heap it leaves frozen, the progress it reports, and what
it is given for images.

A job is forked from a process that froze all that imports made, a million objects. vLLM adds its engine to what is
frozen, and when the engine ends it thaws all of it and collects four times: most of a small engine's processor time,
since a collection writes to every object, and so to memory that the fork shared.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm  # type: ignore[import-untyped]

from mismatch_probe.children.messages import (
    SHARED_MEMORY_VARIABLE,
    folder_of,
    is_job,
    mapped_by,
    own_token,
    processes_with,
)
from mismatch_probe.children.servers import keep_engine
from mismatch_probe.engines.base import EngineStart
from mismatch_probe.engines.vllm.arguments import (
    AUTO,
    check_cpu_cache,
    check_cpu_states,
    check_limits,
    choose_processes,
    divide_cores,
    engine_arguments,
    keep_fp32_exact,
    known_arguments,
    own_arguments,
    prepare_import,
    require_ray_devices,
)
from mismatch_probe.engines.vllm.declared import (
    LATE_TOKENIZER,
    compilation_defaults,
    import_model_file,
    memory_defaults,
    prepare_compilation,
    text_part_defaults,
    tokenizer_defaults,
    vllm_configs,
)
from mismatch_probe.engines.vllm.failures import refused_settings
from mismatch_probe.engines.vllm.worker import WORKER_EXTENSION, adapter_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.images import has_same_pixels, open_images
from mismatch_probe.provenance.checkpoint import has_tokenizer, placeholder_ids, read_config
from mismatch_probe.provenance.environment import recorded_environment
from mismatch_probe.provenance.stored_tensors import Adapter, read_adapter
from mismatch_probe.reading import is_folder
from mismatch_probe.records.sequences import PromptImages

_ASKS: Final = "_run_in_subprocess"


def ask_in_this_process() -> None:
    """Call before an engine is configured: the class is looked at here, where it is to run.

    vLLM looks at an architecture that is new to its cache in an interpreter of its own, which imports for ten seconds
    and leaves a temporary folder where it is killed. It does so to keep CUDA out of a process that forks its workers;
    where CUDA is there already vLLM spawns them. Versions that ask otherwise keep what they have.
    """
    registry: Any = import_module("vllm.model_executor.models.registry")
    if hasattr(registry, _ASKS):
        setattr(registry, _ASKS, lambda look: look())


FULL_VOCABULARY: Final = -1


@dataclass(frozen=True)
class Launch:
    """Keyword arguments of `vllm.LLM`: of them the probe chose `bounds` to save memory and `choices` to save time.

    `adapter` is to be served once the engine runs.
    """

    arguments: dict[str, Any]
    bounds: dict[str, Any]
    choices: dict[str, Any]
    environment: dict[str, str]
    adapter: Adapter | None


def plan_launch(how: EngineStart) -> Launch:
    """Sets up the environment and imports vLLM."""
    checkpoint, dtype, engine = how.checkpoint, how.dtype, how.engine
    check_limits(dtype, how.sampling, engine)
    prepare_import()
    keep_fp32_exact(dtype)
    adapter = None if engine.adapter is None else read_adapter(Path(engine.adapter))
    args = {"max_model_len": how.max_model_len, **engine_arguments(engine.args, known_arguments())}
    choose_processes(args)

    from vllm.platforms import current_platform

    require_ray_devices(args, current_platform.ray_device_key)
    on_cpu = current_platform.is_cpu()
    ask_in_this_process()
    prepare_compilation(on_cpu=on_cpu)
    if on_cpu:
        divide_cores(args)
    environment = recorded_environment()
    whole_config, config = vllm_configs(checkpoint, revision=how.revision, trust_remote_code=how.trust_remote_code)
    import_model_file(whole_config, config)
    has_text = not is_folder(Path(checkpoint)) or has_tokenizer(Path(checkpoint))
    choices = {
        **compilation_defaults(args, on_cpu=on_cpu),
        **text_part_defaults(whole_config, config, args, known_arguments(), how.num_images),
        **(tokenizer_defaults(whole_config, config, args, has_adapter=adapter is not None) if has_text else {}),
    }
    if on_cpu:
        check_cpu_states(dtype, config)
        check_cpu_cache(args.get("kv_cache_dtype", AUTO), dtype, config)
    longest = args["max_model_len"]
    bounds: dict[str, Any] = memory_defaults(
        config,
        args,
        dtype_bytes=dtype.num_bytes,
        max_model_len=longest if longest is not None and longest > 0 else how.max_model_len,
        num_sequences=how.num_sequences,
        on_cpu=on_cpu,
    )
    arguments: dict[str, Any] = {
        "model": checkpoint,
        "dtype": dtype.torch_name,
        "revision": how.revision,
        "trust_remote_code": how.trust_remote_code,
        "seed": how.seed,
        **own_arguments(engine),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": FULL_VOCABULARY,
        "worker_extension_cls": WORKER_EXTENSION,
        **({} if has_text else {LATE_TOKENIZER: True}),
        **adapter_arguments(adapter, dtype, on_cpu=on_cpu),
    }
    return Launch({**args, **bounds, **choices, **arguments}, bounds, choices, environment, adapter)


class _ConfigurationEnd(Exception):  # noqa: N818 - the good end
    pass


class _NoEngine:
    """Stands where `vllm.LLM` finds its engine."""

    @staticmethod
    def from_engine_args(engine_args: Any, usage_context: Any, **_: Any) -> None:
        engine_args.create_engine_config(usage_context)
        raise _ConfigurationEnd


def rehearse(how: EngineStart) -> None:
    """Take `vllm.LLM` as far as its whole configuration. Takes over the process: for one of its own.

    Raises:
        MismatchProbeError: what the start would raise up to there.
    """
    launch = plan_launch(how)
    entry: Any = import_module("vllm.entrypoints.llm")
    real, entry.LLMEngine = entry.LLMEngine, _NoEngine
    try:
        entry.LLM(**launch.arguments)
    except _ConfigurationEnd:
        return
    except Exception as error:
        raise refused_settings(error, how.checkpoint, how.dtype, how.engine.args) from error
    finally:
        entry.LLMEngine = real


_MEMORY_FILES: Final = hasattr(os, "memfd_create")
_CHOOSES: Final = "get_file_store_init_method"
_SOCKETS: Final = "VLLM_RPC_BASE_PATH"
_SHARED: Final = "_CPUSHMDistributed"
_NAMES: Final = "make_group_name"
_TITLE_BESIDE_ENVIRONMENT: Final = "SPT_NOENV"
"""setproctitle, with which vLLM names its processes, would write over the environment that /proc shows."""


def meet_without_a_file() -> None:
    """Call once vLLM is imported. vLLM's own meeting place is a file in the temporary folder, which outlives a kill.

    Versions and systems without it keep what they have.
    """
    if not _MEMORY_FILES:
        return
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        if hasattr(module, _CHOOSES):
            setattr(module, _CHOOSES, _in_memory)


def use_own_sockets() -> None:
    """Call before an engine is started. The sockets of its processes lie in a folder that goes with the job."""
    folder = folder_of(own_token())
    is_given = os.environ.get(_SOCKETS, str(folder)) != str(folder)
    if is_given or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return
    folder.mkdir(exist_ok=True)
    os.environ[_SOCKETS] = str(folder)


def use_own_shared_memory() -> None:
    """Call once vLLM is imported. On a CPU it names the memory that its ranks share by the end of their meeting place,
    which is the same in other engines: what one of them left would be taken for this one's.

    Versions that name it otherwise keep what they have.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import cpu_communicator

    shared_class: Any = getattr(cpu_communicator, _SHARED, None)
    if hasattr(shared_class, _NAMES) and shared_class.make_group_name.__module__ != __name__:
        setattr(shared_class, _NAMES, staticmethod(_with_token(shared_class.make_group_name)))


def _with_token(make_group_name: Any) -> Any:
    from torch import distributed

    token = own_token()

    def name_with_token(communicator: Any) -> str:
        tokens = [token]
        distributed.broadcast_object_list(tokens, src=communicator.ranks[0], group=communicator.device_group)
        return f"{tokens[0]}-{make_group_name(communicator)}".replace("/", "")

    return name_with_token


@contextmanager
def own_processes() -> Iterator[None]:
    """Start an engine in the block, whose processes have this one's token in their environment.

    Where this process is no job, and ends without ending them, its servers do that and remove what they share.
    """
    if is_job():
        yield
        return
    token = own_token()
    keep_engine(token)
    own_variables = {SHARED_MEMORY_VARIABLE: token, _TITLE_BESIDE_ENVIRONMENT: "1"}
    before = {name: os.environ.get(name) for name in own_variables}
    os.environ.update(own_variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    keep_engine(token, mapped_by((Path("/proc/self"), *processes_with(token))))


def _in_memory() -> str:
    """A file in memory, which this process holds open and its children reach as well."""
    return f"file:///proc/{os.getpid()}/fd/{os.memfd_create('rendezvous')}"


KeepFrozen = Callable[[], AbstractContextManager[None]]


def frozen_heap() -> KeepFrozen:
    """Call before an engine starts, and enter what it returns around its start and around its end.

    The engine's own objects are not frozen then, so a collection finds them, and looks at nothing else. Where nothing
    is frozen vLLM does as it likes.
    """
    return _as_it_is if _is_frozen() else nullcontext


def _is_frozen() -> bool:
    """Whether the collector leaves out what is as old as the interpreter.

    `gc.get_freeze_count` would walk through all that is frozen, a quarter of a second at every start.
    """
    return not any(item is sys.modules for item in gc.get_objects())


@contextmanager
def _as_it_is() -> Iterator[None]:
    own = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = own


_NEVER: Final = 1e9


class FinishedRequests(tqdm):  # type: ignore[misc]
    """Given to vLLM as its `tqdm`: draws nothing, and calls `report` with how many of all requests are done."""

    monitor_interval = 0

    def __init__(self, report: Callable[[int, int], None], requests: Iterable[Any] | None = None, **settings: Any):
        super().__init__(requests, **{**settings, "file": StringIO(), "mininterval": _NEVER})
        self._report = report

    def update(self, n: float | None = 1) -> bool | None:
        result: bool | None = super().update(n)
        self._report(int(self.n), int(self.total))
        return result


class ImageInputs:
    """What a started `vllm.LLM` is given for prompts with images; each prompt is prepared once."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._inputs: dict[tuple[str, str], Any] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which the engine was asked to prepare images otherwise."""
        config = self._llm.model_config.multimodal_config
        return dict(getattr(config, "mm_processor_kwargs", None) or {})

    def of_ids(self, token_ids: Sequence[int], images: PromptImages | None) -> dict[str, Any]:
        """The request of ids that hold the placeholders of `images` already; the last ids of the prompt may be absent,
        others may follow.
        """
        if images is None:
            return {"prompt_token_ids": list(token_ids)}
        return {**self._prepare(images), "prompt_token_ids": list(token_ids)}

    def has_same_pixels(self, images: PromptImages) -> bool:
        """Whether the pixel values are those of the checkpoint's own processor in the engine's dtype."""
        items = self._prepare(images)["mm_kwargs"]["image"]
        pixels = [item["pixel_values"].data for item in items if "pixel_values" in item]
        self._inputs.clear()
        return has_same_pixels(images, pixels)

    def _prepare(self, images: PromptImages) -> dict[str, Any]:
        key = (images.text, images.pixels)
        if key not in self._inputs:
            request = {
                "prompt_token_ids": images.engine_token_ids,
                "multi_modal_data": {"image": open_images(images)},
            }
            (engine_input,) = self._llm.renderer.render_cmpl([request], skip_mm_cache=True)
            _require_same_count(engine_input["prompt_token_ids"], images)
            self._inputs[key] = engine_input
        input_of_images: dict[str, Any] = self._inputs[key]
        return input_of_images


def _require_same_count(token_ids: Sequence[int], images: PromptImages) -> None:
    """
    Raises:
        UsageError: vLLM's prompt has another number of placeholders or of tokens.
    """
    ids = set(placeholder_ids(read_config(Path(images.folder))))
    num_tokens = sum(token_id in ids for token_id in token_ids)
    if (num_tokens, len(token_ids)) != (images.num_tokens, images.num_prompt):
        raise UsageError(
            f"vLLM makes {num_tokens} placeholders of {', '.join(images.paths)} in a prompt of {len(token_ids)} "
            f"tokens, and the checkpoint's processor {images.num_tokens} in one of {images.num_prompt}: the two sides "
            "would see other prompts; leave --vllm.mm_processor_kwargs out"
        )
