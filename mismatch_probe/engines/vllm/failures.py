"""vLLM's exceptions as one sentence with the flag that fixes it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, MismatchProbeError, OutOfMemory, StartRefused, UsageError

_MORE_MEMORY: Final = (
    "lower --vllm.max_model_len, --vllm.max_num_seqs or --max-new-tokens, or give it more: "
    "--vllm.gpu_memory_utilization on a GPU, VLLM_CPU_KVCACHE_SPACE (GiB) on a CPU"
)
_RULES: Final[tuple[tuple[str, type[MismatchProbeError], str], ...]] = (
    (
        r"Model architectures? \[?(?P<what>['\"\w, ]+?)\]? (?:are|is) not supported"
        r"|(?P<name>\w+) has no vLLM implementation",
        StartRefused,
        "vLLM does not support the architecture {what}; take another checkpoint or a vLLM that knows it",
    ),
    (
        r"KV cache is needed|No available memory for the cache blocks|on kv cache allocation is less than"
        r"|maximum number of tokens that can be stored in KV cache",
        OutOfMemory,
        "the KV cache does not fit ({cause}); " + _MORE_MEMORY,
    ),
    (
        r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|less than desired (?:GPU|CPU) memory"
        r"|std::bad_alloc",
        OutOfMemory,
        "vLLM ran out of memory ({cause}); " + _MORE_MEMORY,
    ),
    (
        r"SafetensorError|deserializing header|incomplete metadata|MetadataIncompleteBuffer|HeaderTooLarge",
        UsageError,
        "the weights of {checkpoint!r} are broken safetensors ({cause}); fetch the checkpoint again, or fix --model",
    ),
    (
        r"weights were not initialized from checkpoint|Cannot find any model weights"
        r"|There is no module or parameter named|Attempted to load weight"
        r"|start \(\d+\) \+ length \(\d+\) exceeds dimension size",
        UsageError,
        "the weights of {checkpoint!r} do not match its config.json ({cause}); fetch the checkpoint again, or fix "
        "--model",
    ),
    (
        r"max_model_len \(\d+\) is greater than",
        UsageError,
        "the context of {checkpoint!r} is too short ({cause}); lower --max-new-tokens or --vllm.max_model_len",
    ),
)
CONFIGURING: Final = "configuring"
STARTING: Final = "starting"
_OWN_PROCESS_FAILED: Final = r"Engine core initialization failed|EngineDeadError|Executor failed"
_STANDARD_ERROR: Final = Path("/proc/self/fd/2")
_START: Final = "Initializing a V1 LLM engine"
_EXCEPTION: Final = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)


def engine_failure(error: BaseException, checkpoint: str, doing: str) -> MismatchProbeError:
    """The error to raise from `error`, which vLLM raised while it was `doing` something ("starting", "sampling")."""
    if known_error := _recognise(error, checkpoint):
        return known_error
    if argument := _refused_argument(error):
        return UsageError(f"vLLM refuses --vllm.{argument}: {_last_line(str(error))}")
    kind = StartRefused if doing in (CONFIGURING, STARTING) else EngineError
    return kind(f"vLLM failed while {doing} {checkpoint!r}: {_last_line(_text(error))}")


@contextmanager
def engine_failures(checkpoint: str, doing: str) -> Iterator[None]:
    """Within, what vLLM raises is raised as `engine_failure`."""
    try:
        yield
    except Exception as error:
        raise engine_failure(error, checkpoint, doing) from error


def start_failure(
    error: BaseException, checkpoint: str, dtype: Dtype, args: Mapping[str, object]
) -> MismatchProbeError:
    """The error to raise from `error`, with which vLLM ended its start: of its configuration, or of anything later."""
    if _refused_argument(error):
        return refused_settings(error, checkpoint, dtype, args)
    return engine_failure(error, checkpoint, STARTING)


def refused_settings(
    error: BaseException, checkpoint: str, dtype: Dtype, args: Mapping[str, object]
) -> MismatchProbeError:
    """The error to raise from `error`, which vLLM raised over its configuration: the settings' doing as a rule."""
    if known_error := _recognise(error, checkpoint):
        return known_error
    if not isinstance(error, ValueError | TypeError | LookupError | NotImplementedError | AssertionError):
        return engine_failure(error, checkpoint, CONFIGURING)
    flags = " ".join(f"--vllm.{name} {value}" for name, value in args.items())
    field = _refused_argument(error)
    reason = (f"{field}: " if field else "") + _last_line(_text(error))
    return UsageError(f"vLLM refuses {checkpoint!r} in {dtype}{' with ' if flags else ''}{flags}: {reason}")


def _recognise(error: BaseException, checkpoint: str) -> MismatchProbeError | None:
    if isinstance(error, MismatchProbeError):
        return error
    text = _text(error)
    own_process = re.search(_OWN_PROCESS_FAILED, text)
    cause = root_cause() if own_process else None
    if cause is not None:
        text = f"{text}\n{cause}"
    for pattern, kind, sentence in _RULES:
        if match := re.search(pattern, text):
            values = [value for value in match.groupdict().values() if value]
            what = values[0].replace("'", "").replace('"', "") if values else ""
            return kind(sentence.format(what=what, checkpoint=checkpoint, cause=_line_with(match.group(), text)))
    if cause is not None:
        return EngineError(f"vLLM's own process failed: {_clean(cause)}")
    if own_process:
        why = _line_with(own_process.group(), text)
        return EngineError(f"vLLM's own process failed; its log above this line says why ({why})")
    return None


def _text(error: BaseException) -> str:
    return "\n".join(f"{type(link).__name__}: {link}" for link in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what caused it, root cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused_argument(error: BaseException) -> str | None:
    """The field a pydantic error of vLLM's configuration names."""
    from pydantic import ValidationError

    for link in _chain(error):
        if isinstance(link, ValidationError) and (where := link.errors()[0]["loc"]):
            return str(where[0])
    return None


def _line_with(part: str, text: str) -> str:
    first = part.splitlines()[0]
    line = next((line for line in text.splitlines() if first in line), first)
    return _clean(line)


def _last_line(text: str) -> str:
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("For further information")
    ]
    return _clean(lines[-1]) if lines else "it gave no reason"


def _clean(line: str) -> str:
    line = re.sub(r"\s*\[type=.*$", "", line.strip())
    return re.sub(r"^(?:\w+Error|Value error)[:,]\s*", "", line).rstrip(". ")[:300]


def root_cause() -> str | None:
    """The first exception that the engine started last wrote, as `Type: message`.

    None where there is none, or where standard error is no file that could be read again.
    """
    if not _STANDARD_ERROR.is_file():
        return None
    text = _STANDARD_ERROR.read_text(encoding="utf-8", errors="replace")
    exception = _EXCEPTION.search(text, max(text.rfind(_START), 0))
    return exception[1] if exception else None
