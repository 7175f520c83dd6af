"""What a checkpoint declares of itself to vLLM, and the text part of one that also sees.

Importing vLLM takes seconds and changes the process that does it.
"""

import ast
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mismatch_probe.errors import INSTALL_ENGINES, EngineError, MissingExtra, StartRefused, UsageError, message_of

_TEXT_ALONE: Final = "language_model_only"
_LIMITS: Final = "limit_mm_per_prompt"
TEXT_PART_ARGS: Final = frozenset({_TEXT_ALONE, _LIMITS})
_IMAGES: Final = "torchvision"
_PARTS: Final = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops")


def text_part_defaults(
    config: Any, text_config: Any, args: Mapping[str, Any], known_names: Collection[str], num_images: int = 0
) -> dict[str, Any]:
    """Arguments with which vLLM leaves out the parts that prompts never reach; none where the user set them.

    config: the checkpoint's, of which `text_config` is a part, or the same where it knows text alone. known: the
    engine's arguments. num_images: the most that a prompt holds; for prompts of text all parts but the text's are left
    out.
    """
    if text_config is config or _TEXT_ALONE in args or _LIMITS in args:
        return {}
    if num_images:
        return {_LIMITS: {"image": num_images, "video": 0}}
    return {_TEXT_ALONE: True} if _TEXT_ALONE in known_names else {_LIMITS: {"image": 0, "video": 0}}


LATE_TOKENIZER: Final = "skip_tokenizer_init"
_READ_TEXT: Final = ("logits_processors", "mm_", "reasoning", "runner", "spec", "structured", "tokenizer")
"""Beginnings of arguments of what reads text from the start on, or reads it otherwise."""


def tokenizer_defaults(config: Any, text_config: Any, args: Mapping[str, Any], *, has_adapter: bool) -> dict[str, Any]:
    """The argument with which vLLM starts without its tokenizer, to be given it once it runs (`give_tokenizer`).

    Starting with it vLLM copies it, and renders a chat on trial, for which it loads it again: of 260,000 words 9 s of
    processor time. An engine whose start may read text gets no such argument, nor does a version that keeps its
    tokenizer in another place.
    """
    is_plain = text_config is config and not has_adapter and not any(name.startswith(_READ_TEXT) for name in args)
    return {LATE_TOKENIZER: True} if is_plain and _keeps_tokenizer_in_renderer() else {}


def _keeps_tokenizer_in_renderer() -> bool:
    try:
        tokenizers, renderers = import_module("vllm.tokenizers"), import_module("vllm.renderers.base")
    except ModuleNotFoundError:
        return False
    return hasattr(tokenizers, "cached_tokenizer_from_config") and hasattr(renderers, "BaseRenderer")


_TEXT_PART: Final = "_text"
"""How the names of architectures end that are the text part of one that sees too."""


def import_model_file(config: Any, text_config: Any) -> None:
    """Import vLLM's file of an architecture that sees or hears too, or is the text part of one, as vLLM is about to.

    The file imports what prepares images, which wants torchvision: a stand-in takes its place where it is not
    installed, as in vLLM's CPU build, since nothing of it is called for text.

    Raises:
        StartRefused: the file cannot be imported, with the reason, which vLLM itself only writes to its log.
    """
    if text_config is config and not str(getattr(config, "model_type", "")).endswith(_TEXT_PART):
        return
    registry: Any = import_module("vllm.model_executor.models.registry")
    for name in getattr(config, "architectures", None) or ():
        model = registry.ModelRegistry.models.get(name)
        if model is None or not hasattr(model, "load_model_cls"):
            continue
        try:
            with _stand_in():
                model.load_model_cls()
        except ImportError as error:
            raise StartRefused(
                f"vLLM cannot load its model file of {name} ({message_of(error)}); install that package beside vLLM, "
                "or take another checkpoint"
            ) from error


@contextmanager
def _stand_in() -> Iterator[None]:
    """Where torchvision is missing, it can be imported within, and everything in it is an empty class."""
    import_module("transformers.utils").is_torchvision_available()  # the answer is kept: it is not there
    if find_spec(_IMAGES) is not None:
        yield
        return
    names = [_IMAGES, *(f"{_IMAGES}.{part}" for part in _PARTS)]
    for name in names:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


class _Nothing(ModuleType):
    """A package in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", type(name, (), {}))


_BLOCK_TOKENS: Final = 128
"""Tokens a KV block holds on vLLM's CPU back end."""
_SEQUENCES: Final = 256
"""vLLM's offline default of `max_num_seqs` on a CPU."""
_FREE_MEMORY_SHARE: Final = 0.4
"""Of the free memory; weights, activations and replayed log-probs take the rest."""
_REPLAY_LOGITS_BYTES: Final = 2**30
_BYTES_PER_LOGIT: Final = 12
"""A logit as computed (at most 4 bytes), its FP32 copy or log-prob, and a temporary of the rank count."""
_FEWEST_TOKENS: Final = 256
_MOST_TOKENS: Final = 4096

KV_SIZE_ARGS: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


def memory_defaults(
    config: Any,
    args: Mapping[str, Any],
    *,
    dtype_bytes: int,
    max_model_len: int,
    num_sequences: int | None,
    on_cpu: bool,
) -> dict[str, Any]:
    """Engine arguments that bound memory, for those of them the user left open.

    `config` is what `read_config` returns. A CPU's cache holds `num_sequences` of full length, where that is known, and
    never more than run at once.
    """
    defaults: dict[str, Any] = {}
    if "max_num_batched_tokens" not in args:
        whole_prompt = max_model_len if args.get("enable_chunked_prefill") is False else 0
        tokens = max(replay_tokens(config.vocab_size), args.get("max_num_seqs") or 0, whole_prompt)
        if tokens < _MOST_TOKENS:
            defaults["max_num_batched_tokens"] = tokens
    if on_cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE") and not any(name in args for name in KV_SIZE_ARGS):
        import psutil

        size = int(psutil.virtual_memory().available * _FREE_MEMORY_SHARE)
        if isinstance(getattr(config, "num_attention_heads", None), int):
            at_once = args.get("max_num_seqs") or _SEQUENCES
            sequences = at_once if num_sequences is None else min(at_once, num_sequences)
            size = min(size, kv_cache_bytes(config, dtype_bytes, max_model_len=max_model_len, num_sequences=sequences))
        defaults["kv_cache_memory_bytes"] = size // args.get("tensor_parallel_size", 1)
    return defaults


def replay_tokens(vocab_size: int) -> int:
    """Positions a step may hold so that `[positions, vocab_size]` logits and log-probs stay near 1 GiB.

    vLLM's V1 runner scores all prompt positions of a request that one step holds at once, and its memory profile does
    not count them.
    """
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, _REPLAY_LOGITS_BYTES // (_BYTES_PER_LOGIT * vocab_size)))


def kv_cache_bytes(config: Any, dtype_bytes: int, *, max_model_len: int, num_sequences: int) -> int:
    """Keys and values of `num_sequences` full-length sequences in whole blocks, and one block more.

    An upper bound: a layer with a sliding window or a latent cache holds less. Recurrent layers hold a state.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    blocks = num_sequences * -(-max_model_len // _BLOCK_TOKENS) + 1
    keys_and_values = 2 * kv_heads * head_dim * dtype_bytes * blocks * _BLOCK_TOKENS
    return int(config.num_hidden_layers * (keys_and_values + _pages_of_states(num_sequences) * _state_bytes(config)))


def _pages_of_states(num_sequences: int) -> int:
    """Pages a layer: a sequence has one of its state, and one of keys and values that vLLM makes as large."""
    return 2 * (num_sequences + 2)


_STATES: Final = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
)
_CONVOLUTION: Final = 1.5
"""What a convolution's window adds to a state, at most."""


def _state_bytes(config: Any) -> int:
    """The recurrent state of a layer and a sequence in FP32; 0 for a model of attention alone."""
    sizes = ([getattr(config, name, None) or 0 for name in names] for names in _STATES)
    return int(_CONVOLUTION * 4 * max(prod(map(int, size)) for size in sizes))


def vllm_configs(checkpoint: str, *, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any]:
    """The checkpoint's config as vLLM reads it, and the part of it that describes the text: the same where it is all.

    Raises:
        UsageError: there is no such checkpoint, or its `config.json` cannot be read.
    """
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    try:
        config = get_config(checkpoint, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"the checkpoint {checkpoint!r} cannot be used: {reason.rstrip('.')}; fix --model") from error
    return config, get_hf_text_config(config)


COMPILATION_ARGS: Final = (
    "enforce_eager",
    "compilation_config",
    "optimization_level",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
)


def compilation_defaults(args: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """Engine arguments for a user who sets nothing about compilation: eager on a CPU, vLLM's own choice elsewhere.

    Measured on a CPU: compiling takes 12 to 32 s a start, and 512 responses take 5.0 s compiled and 4.7 s eagerly.
    """
    if not on_cpu or any(name in args for name in COMPILATION_ARGS):
        return {}
    return {"enforce_eager": True}


def prepare_compilation(*, on_cpu: bool) -> None:
    """Let a second start on a CPU load what the first one compiled; what is compiled ahead of time cannot be loaded."""
    if on_cpu:
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


_LEFT_OPEN_IS_CHOSEN: Final = frozenset(
    {
        *COMPILATION_ARGS,
        *KV_SIZE_ARGS,
        *TEXT_PART_ARGS,
        "distributed_executor_backend",
        "max_model_len",
        "max_num_batched_tokens",
    }
)
"""What the probe chooses where it is not given: to give vLLM's default says something."""


@cache
def known_arguments() -> dict[str, str]:
    """Every engine argument with its type as text.

    Raises:
        MissingExtra: vLLM is not installed.
        EngineError: this vLLM declares its arguments elsewhere.
    """
    return {name: ast.unparse(node.annotation) for name, node in _declarations()}


@cache
def default_arguments() -> dict[str, Any]:
    """The defaults that stand in the source as plain values, of arguments that say nothing where they have them."""
    fields, defaults = _config_fields(), {}
    for name, node in _declarations():
        if name in _LEFT_OPEN_IS_CHOSEN or node.value is None:
            continue
        value = fields.get(ast.unparse(node.value), node.value)
        with suppress(ValueError):
            defaults[name] = ast.literal_eval(value)
    return defaults


def _declarations() -> list[tuple[str, ast.AnnAssign]]:
    path = _package() / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        class_of_arguments = next(
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
        )
    except (OSError, StopIteration) as error:
        raise EngineError(
            f"the installed vLLM declares no EngineArgs in {path}; install a version that mismatch-probe supports"
        ) from error
    return list(_fields(class_of_arguments))


def _config_fields() -> dict[str, ast.expr]:
    """What the classes of vLLM's configuration give their fields, by `Class.field`, as `EngineArgs` refers to them."""
    values = {}
    for path in sorted((_package() / "config").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for name, field in _fields(node):
                    if field.value is not None:
                        values[f"{node.name}.{name}"] = _default(field.value)
    return values


def _default(value: ast.expr) -> ast.expr:
    """The default in `Field(default=1, ge=1)`; a value itself elsewhere."""
    if isinstance(value, ast.Call):
        return next((word.value for word in value.keywords if word.arg == "default"), value)
    return value


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, field


def _package() -> Path:
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise MissingExtra(f"vLLM is not installed, and its arguments are read from it; run {INSTALL_ENGINES}")
    return Path(package.origin).parent
