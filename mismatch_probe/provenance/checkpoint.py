"""What a checkpoint is, read from its files alone: identity, fingerprint, size, context length."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, Final

from mismatch_probe.errors import UsageError
from mismatch_probe.reading import Unreadable, as_object, open_file, parse_json, read_json
from mismatch_probe.records.manifest import ModelIdentity

_WHOLE_FILE_BYTES = 256 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 20
_LONGEST_HEADER_BYTES = 100_000_000
"""More is refused by safetensors as well."""
_WEIGHTS = ("*.safetensors",)
_INDEX = "model.safetensors.index.json"
_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "adapter_config.json",
)
_OTHER_OBJECTS = ("generation_config.json", "tokenizer_config.json")
_TOKENIZERS = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken*.json", "sentencepiece*", "*.spm"
)  # fmt: skip
"""What the tokenizers of the field are kept in."""
_BEGINS_WITH_BOS = "gemma"
"""Part of the model types whose every text begins with the beginning of sequence."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json; what else describes it must be readable too.

    Raises:
        UsageError: it is missing, one of the files holds no JSON object, or its architectures are no list of names.
    """
    config = read_description(folder / "config.json")
    if config is None:
        raise UsageError(f"{folder} is not a checkpoint: it has no config.json; give --model a folder that has one")
    for name in _OTHER_OBJECTS:
        read_description(folder / name)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(
            f"{folder / 'config.json'} gives its architectures as {names!r}, and they are a list of names, such as "
            '["LlamaForCausalLM"]; fix it'
        )
    return config


def identity_of(name: str, folder: Path) -> ModelIdentity:
    """The identity of the checkpoint in a folder, which a user calls `name`."""
    config = read_config(folder)
    return ModelIdentity(
        name=name,
        folder=str(folder),
        fingerprint=fingerprint(folder),
        architecture=architecture(config),
        context_length=context_length(config),
        checkpoint_dtype=checkpoint_dtype(config),
        weight_bytes=weight_bytes(folder),
        has_tokenizer=has_tokenizer(folder),
        start_token=start_token(folder),
        sees_too=text_config(config) is not config,
    )


def end_token_ids(folder: Path, of_tokenizer: int | None) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's, and those of config.json and generation_config.json."""
    ids: list[Any] = [of_tokenizer]
    for name in ("config.json", "generation_config.json"):
        end_ids = (read_description(folder / name) or {}).get("eos_token_id")
        ids += end_ids if isinstance(end_ids, list) else [end_ids]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def start_token(folder: Path) -> tuple[int, str] | None:
    """The token, as id and text, that every text of this family begins with; None where none is declared.

    Gemma's models were trained with it before everything. Elsewhere it is what the tokenizer's settings add, where no
    chat template says how a prompt begins.
    """
    config = text_config(read_config(folder))
    settings = read_description(folder / "tokenizer_config.json") or {}
    has_template = (folder / "chat_template.jinja").exists() or bool(settings.get("chat_template"))
    is_added = settings.get("add_bos_token") is True and not has_template
    token_id = config.get("bos_token_id")
    if type(token_id) is not int or not (is_added or _BEGINS_WITH_BOS in str(config.get("model_type"))):
        return None
    token = settings.get("bos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return token_id, text if isinstance(text, str) else "BOS"


def read_description(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file that describes the checkpoint; None where there is no such file.

    Raises:
        UsageError: it holds none.
    """
    try:
        return as_object(read_json(path, constants=True))
    except FileNotFoundError:
        return None
    except Unreadable as error:
        raise UsageError(
            f"{path} cannot be read ({error}): the checkpoint is damaged; give --model an intact one"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether any file of a tokenizer is there, be it whole or not."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, each with a header that can be read and the length it promises.

    With an index they are those that it lists: what else lies in the folder holds the same weights in another layout.

    Raises:
        UsageError: there are none, one is truncated or not safetensors, or one that the index lists is missing.
    """
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise UsageError(
            f"{folder} holds no .safetensors weights; give --model a checkpoint saved with save_pretrained"
        )
    index_files = _index_files(folder)
    missing = index_files - {path.name for path in files}
    if missing:
        raise UsageError(
            f"{folder} lacks {', '.join(sorted(missing))}, which its index lists: download the checkpoint again"
        )
    files = [path for path in files if path.name in index_files] if index_files else files
    for path in files:
        safetensors_header(path)
    return files


def _index_files(folder: Path) -> set[str]:
    """Names of the weight files in the index; none without one."""
    path = folder / _INDEX
    if not path.exists():
        return set()
    try:
        files = as_object(as_object(read_json(path)).get("weight_map")).values()
        if not all(isinstance(name, str) for name in files):
            raise Unreadable("a weight is in no file")
        return set(files)
    except Unreadable as error:
        raise UsageError(f"{path} is no index of weights ({error}): download the checkpoint again") from error


def safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor names with dtype, shape and offsets (the format's JSON header).

    Raises:
        UsageError: the file is truncated or not safetensors.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER_BYTES):
                raise Unreadable("its header does not fit in the file")
            header = as_object(parse_json(file.read(length).decode()))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((_end(name, entry) for name, entry in entries.items()), default=0)
        if size != 8 + length + end:
            raise Unreadable(f"it has {size} bytes where its header promises {8 + length + end}")
    except (FileNotFoundError, Unreadable, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not an intact safetensors file ({error}): copy or download the checkpoint again"
        ) from error
    return entries


def _end(name: str, entry: Any) -> int:
    """Where a tensor ends in the data behind the header."""
    match entry:
        case {"dtype": str(), "shape": [*sizes], "data_offsets": [int(begin), int(end)]}:
            if 0 <= begin <= end and all(type(size) is int and size >= 0 for size in sizes):
                return end
    raise Unreadable(f"its header describes no tensor under {name!r}")


def fingerprint(folder: Path) -> str:
    """Hash of what the checkpoint computes: description files and weights, as 16 hexadecimal digits.

    A weight file over 256 MiB is hashed by its size, header end and 64 evenly spaced samples of 1 MiB, so that a large
    checkpoint is recognised in seconds; an optimizer step changes every sample.
    """
    digest = hashlib.sha256()
    paths = [folder / name for name in _DESCRIPTIONS if (folder / name).exists()] + weight_files(folder)
    for path in paths:
        update_with_file(digest, path)
    return digest.hexdigest()[:16]


def update_with_file(digest: "hashlib._Hash", path: Path) -> None:
    """Add a file's name, size and content to `digest`, as `fingerprint` says.

    Raises:
        UsageError: it cannot be read.
    """
    with _open_description(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name}:{size}\n".encode())
        if size <= _WHOLE_FILE_BYTES:
            while block := file.read(_SAMPLE_BYTES):
                digest.update(block)
            return
        for sample in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


@contextmanager
def _open_description(path: Path) -> Iterator[IO[bytes]]:
    try:
        with open_file(path) as file:
            yield file
    except (FileNotFoundError, Unreadable) as error:
        raise UsageError(f"{path} cannot be read ({error}): give --model an intact checkpoint") from error


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def num_parameters(folder: Path) -> int:
    """Number of stored weights, from the headers alone."""
    return sum(prod(entry["shape"]) for path in weight_files(folder) for entry in safetensors_header(path).values())


def context_length(config: dict[str, Any]) -> int | None:
    """Longest sequence the architecture was made for, None where the config does not say.

    Raises:
        UsageError: it says that there is no room for a token.
    """
    text = text_config(config)
    name = next((key for key in _CONTEXT_KEYS if type(text.get(key)) is int), None)
    if name is not None and text[name] < 1:
        raise UsageError(f"config.json gives {name} = {text[name]}, which leaves no room for a token; fix it")
    return None if name is None else int(text[name])


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, of one that sees or hears too."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def vocab_size(config: dict[str, Any]) -> int | None:
    """How many token ids the model knows, None where the config does not say."""
    size = text_config(config).get("vocab_size")
    return size if type(size) is int and size > 0 else None


_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Keys that name the token of an image's or a film's patches."""


def placeholder_ids(config: Mapping[str, Any]) -> list[int]:
    """The tokens that stand for parts of images and films; none of a model of text alone."""
    return sorted({config[key] for key in _PLACEHOLDERS if isinstance(config.get(key), int)})


def architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", "unknown"))


def checkpoint_dtype(config: dict[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return None if value is None else str(value)
