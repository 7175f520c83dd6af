"""What `--model` names: the shipped checkpoint, a folder, or a hub id; and the tokenizer that comes with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.errors import MissingExtra, UsageError, said
from mismatch_probe.provenance.checkpoint import has_tokenizer
from mismatch_probe.reading import Unreadable, expanded, is_folder, is_there
from mismatch_probe.tasks.problems import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEMO_MODEL: Final = "demo"
_CHECKPOINT_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
_OTHER_LAYOUTS: Final = ["consolidated*.safetensors", "original/*", "metal/*"]
"""The same weights once more, for other programs."""


def resolve_model(model: ModelSettings, flag: str = "--model") -> Path:
    """The folder of the checkpoint; that of a hub id is downloaded, or found in the hub's cache. flag: what named it.

    Raises:
        UsageError: a file, a folder that is absent, a revision of a folder, or a hub id that cannot be had.
        MissingExtra: a hub id is given and huggingface_hub is not installed.
    """
    ways = f"give {flag} a checkpoint's folder, a hub id, or {DEMO_MODEL!r}"
    if not model.path.strip():
        raise UsageError(f"the model has no name; {ways}")
    try:
        folder = DEMO_CHECKPOINT if model.path == DEMO_MODEL else expanded(model.path)
    except Unreadable as error:
        raise UsageError(f"model {model.path} cannot be read ({error}); {ways}") from error
    if is_folder(folder):
        if model.revision is not None:
            raise UsageError(f"model {model.path} is a folder, which has no revisions; leave --revision out")
        _require_files(folder)
        return folder
    if is_there(folder):
        raise UsageError(f"model {model.path} is a file, not a folder; {ways}")
    if folder.is_absolute() or model.path.startswith(".") or len(folder.parts) > 2:
        raise UsageError(f"model folder {model.path} does not exist; {ways}")
    return _download(model, ways)


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The checkpoint's tokenizer.

    Raises:
        UsageError: the folder holds none, or one that cannot be read.
        MissingExtra: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing("transformers", "a tokenizer") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise _no_tokenizer(folder, said(error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise _no_tokenizer(folder, "it has no vocabulary")
    return tokenizer


def tokenizer_for(
    prompts: Sequence[Prompt], folder: str | Path, *, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase | None":
    """The checkpoint's tokenizer; None where it has none and all prompts are token ids, which need none.

    Raises as `load_tokenizer`.
    """
    if not has_tokenizer(Path(folder)) and all(prompt.token_ids is not None for prompt in prompts):
        return None
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)


def _require_files(folder: Path) -> None:
    """Readers of checkpoints wait for ever at a pipe."""
    odd = next((path for path in folder.iterdir() if is_there(path) and not (path.is_file() or path.is_dir())), None)
    if odd is not None:
        raise UsageError(f"{odd} is a pipe, a socket or a device, not a file: give --model an intact checkpoint")


def _download(model: ModelSettings, ways: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _missing("huggingface_hub", "a model of the hub") from error
    try:
        return Path(
            snapshot_download(
                model.path,
                revision=model.revision,
                allow_patterns=_CHECKPOINT_FILES,
                ignore_patterns=_OTHER_LAYOUTS,
            )
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model {model.path} is no folder here and cannot be had from the hub ({said(error)}); {ways}"
        ) from error


def _no_tokenizer(folder: str | Path, reason: str) -> UsageError:
    return UsageError(
        f"the tokenizer of {folder} cannot be loaded ({reason}); give --model a folder with the tokenizer's files "
        "beside config.json"
    )


def _missing(package: str, purpose: str) -> MissingExtra:
    return MissingExtra(
        f"{purpose} needs the package {package}, which is not installed; run pip install 'mismatch-probe[training]'"
    )
