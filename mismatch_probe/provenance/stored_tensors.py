"""What folders store: a checkpoint's tensors, quantised ones, and adapters in peft's format."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.checkpoint import (
    read_config,
    safetensors_header,
    text_config,
    update_with_file,
    weight_files,
)
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.reading import Unreadable, as_object, read_json

_AT_A_TIME: Final = 1 << 23
_WORD: Final = 8
_PIECES: Final = 16
_DTYPES: Final = {dtype.safetensors_name: dtype for dtype in Dtype}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; `format` is the one of its file, BF16 for instance."""

    path: Path
    begin: int
    num_bytes: int
    format: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Dtype | None:
        """The format of its numbers; None where they are of one that nothing computes in alone."""
        return _DTYPES.get(self.format)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by name."""
    tensors = {}
    for path in weight_files(folder):
        header = safetensors_header(path)
        ends = [entry["data_offsets"][1] for entry in header.values()]
        data = path.stat().st_size - max(ends, default=0)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = StoredTensor(path, data + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
    return tensors


def pieces(num_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Where to read a tensor, as first byte and number of bytes: all of it, or `most` in evenly spaced pieces."""
    if num_bytes <= most:
        for first in range(0, num_bytes, _AT_A_TIME):
            yield first, min(_AT_A_TIME, num_bytes - first)
        return
    size = most // _PIECES // _WORD * _WORD
    for number in range(_PIECES):
        yield (num_bytes - size) * number // (_PIECES - 1) // _WORD * _WORD, size


def as_numbers(piece: bytes, dtype: Dtype) -> npt.NDArray[np.float64]:
    """The bytes of a piece as numbers."""
    if dtype is Dtype.BF16:
        return (np.frombuffer(piece, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(piece, np.dtype(dtype.torch_name)).astype(np.float64)


_NAMES: Final = ("quantization_config", "compression_config")
CHECKPOINT: Final = "checkpoint"
AT_LOAD: Final = "at load"


def stored_quantization(folder: Path) -> str | None:
    """How the checkpoint's own weights are quantised, by the name its config gives; None where they are not."""
    config = read_config(folder)
    for part in (config, text_config(config)):
        for name in _NAMES:
            entry = part.get(name)
            if entry:
                return str(entry.get("quant_method", name)) if isinstance(entry, dict) else name
    return None


def quantized_facts(
    folder: Path, method: str | None, dtype: Dtype, *, is_expanded: bool = False
) -> dict[str, Any] | None:
    """What a side that runs in `dtype` holds quantised by `method`, as plain JSON values; None where nothing is.

    source: `checkpoint` where that stores the quantised weights, else `at load`: the side rounds what it has read into
    `dtype`. stored: weights of the checkpoint by the format of its files. expanded: the quantised weights are brought
    to `dtype` again before anything is computed.
    """
    own = stored_quantization(folder)
    if method is None and own is None:
        return None
    return {
        "method": method or own,
        "source": AT_LOAD if own is None else CHECKPOINT,
        "read_as": None if own else str(dtype),
        "stored": stored_formats(folder),
        "expanded": is_expanded,
    }


def stored_formats(folder: Path) -> dict[str, int]:
    """Weights of a checkpoint by the format of its files: `{"bf16": 1000, "f8_e4m3": 9000}`."""
    formats: Counter[str] = Counter()
    for path in weight_files(folder):
        for entry in safetensors_header(path).values():
            name = str(entry["dtype"])
            formats[str(_DTYPES.get(name, name.lower()))] += prod(entry["shape"])
    return dict(formats)


WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"

PREFIX: Final = "base_model.model."
"""What peft writes before a module's name."""
_HEAD: Final = "lm_head"
"""With an adapter there vLLM cannot compute log-probs of given tokens."""
_LOW_RANK: Final = (".lora_A.weight", ".lora_B.weight")
_SCALE_KEYS: Final = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_MUST_BE_UNSET: Final = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "megatron_config", "velora_config", "monteclora_config",
    "kasa_config", "arrow_config", "fan_in_fan_out",
)  # fmt: skip
_PLAIN_INITS: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to begin that leave the base weights as they are, so that the file says everything."""


@dataclass(frozen=True)
class Adapter:
    """`rank` is the largest of any module; `modules` are the adapted modules' names in the checkpoint, sorted.

    `scale` holds the settings that its matrices are scaled by, as in its file; `fingerprint` hashes them and the
    matrices.
    """

    folder: Path
    rank: int
    alpha: float
    modules: tuple[str, ...]
    scale: dict[str, Any]
    fingerprint: str

    @property
    def names(self) -> list[str]:
        """The last part of the adapted modules' names, each once, such as q_proj."""
        return sorted({module.rpartition(".")[2] for module in self.modules})

    def facts(self) -> dict[str, Any]:
        """What a record keeps of it, as plain values."""
        return {
            "folder": str(self.folder),
            "fingerprint": self.fingerprint,
            "rank": self.rank,
            "alpha": self.alpha,
            "target_modules": self.names,
        }


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`.

    Raises:
        UsageError: there is none, it is damaged, or it does more than add a product of two matrices to linear layers.
    """
    config = _config(folder)
    _require_plain(folder, config)
    weights = folder / WEIGHTS
    if not weights.exists():
        raise UsageError(f"{folder} holds no {WEIGHTS}; give the folder that peft's save_pretrained wrote")
    shapes = {name: entry["shape"] for name, entry in safetensors_header(weights).items()}
    others = [name for name in shapes if not name.endswith(_LOW_RANK) or f".{_HEAD}." in name]
    if others or not shapes:
        raise UsageError(
            f"the adapter {folder} holds {others[0] if others else 'no matrix'}, and only lora_A and lora_B of linear "
            "layers inside the model can be served and scored; adapt those alone, or merge it into a checkpoint"
        )
    ranks = [shape[0] for name, shape in shapes.items() if name.endswith(_LOW_RANK[0])]
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in shapes}
    scale = {key: config[key] for key in _SCALE_KEYS if config.get(key)}
    digest = hashlib.sha256(content_key(scale).encode())
    update_with_file(digest, weights)
    return Adapter(
        folder,
        rank=max(ranks),
        alpha=float(config["lora_alpha"]),
        modules=tuple(sorted(modules)),
        scale=scale,
        fingerprint=digest.hexdigest()[:16],
    )


def adapter_keys(folders: Iterable[str | None]) -> dict[str, str]:
    """Content keys of the adapters that a run's sides compute with, by their folders."""
    return {adapter_key(folder): read_adapter(Path(folder)).fingerprint for folder in folders if folder is not None}


def adapter_key(folder: str) -> str:
    """The name of the content key of the adapter in `folder`."""
    return f"adapter {folder}"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = as_object(read_json(path, constants=True))
    except FileNotFoundError as error:
        raise UsageError(f"{folder} is no adapter: it has no {CONFIG}; give a folder that peft saved") from error
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read ({error}): give an intact adapter") from error
    if config.get("peft_type") != "LORA":
        raise UsageError(
            f"{folder} is a {config.get('peft_type')} adapter; only LORA adapters can be served and scored"
        )
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise UsageError(f"{path} gives {name} = {value!r}, which is no positive number; give an intact adapter")
    return config


def _require_plain(folder: Path, config: dict[str, Any]) -> None:
    odd = {name: config[name] for name in _MUST_BE_UNSET if config.get(name)}
    if config.get("bias", "none") != "none":
        odd["bias"] = config["bias"]
    initialisation = config.get("init_lora_weights", True)
    if isinstance(initialisation, str) and initialisation.lower() not in _PLAIN_INITS:
        odd["init_lora_weights"] = initialisation
    if odd:
        name, value = next(iter(odd.items()))
        raise UsageError(
            f"the adapter {folder} has {name} = {value!r}, which vLLM does not serve; merge it into a checkpoint and "
            "compare that"
        )
