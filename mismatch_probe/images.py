"""The images of prompts: their files, and what the processor of the run's checkpoint makes of them.

Both sides get their pixels from the same files. The training path has those of this processor; an engine prepares its
own, whose digests are compared with these.
"""

import hashlib
import warnings
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.errors import MissingExtra, UsageError, message_of
from mismatch_probe.provenance.checkpoint import placeholder_ids, read_config
from mismatch_probe.reading import Unreadable, open_file
from mismatch_probe.records.sequences import EncodedPrompt, PromptImages

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PIXELS: Final = "pixel_values"
_TEXT_INPUTS: Final = ("input_ids", "attention_mask")
BOTH_WAYS: Final = "token_type_ids"
"""The argument by which architectures of transformers let the tokens of an image see each other in both directions."""
SHOWN_AS: Final = "[image]"
"""What the text of a prompt has in place of an image's placeholders."""


def read_image(path: Path, label: str) -> "tuple[Image, str]":
    """The first picture of a file in RGB, and the file's SHA-256; label: how a sentence names the prompt.

    Raises:
        UsageError: the file is missing, broken, of another format, or larger than Pillow decodes without a warning.
        MissingExtra: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(
            f"{label} holds an image, and that needs the package Pillow, which is not installed; run pip install pillow"
        ) from error
    try:
        with open_file(path) as file:
            content = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(content), formats=_FORMATS) as image:
                return image.convert("RGB"), hashlib.sha256(content).hexdigest()
    except FileNotFoundError:
        reason = "it does not exist"
    except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its decoder meets
        reason = f"it is no {', '.join(_FORMATS)} that can be read" if _says_nothing(error) else message_of(error)
    raise UsageError(f"{label} holds the image {path}, which cannot be read ({reason}); fix the file or its path")


def _says_nothing(error: Exception) -> bool:
    """Whether Pillow's reason names the buffer it was given, as where no format fits."""
    return not isinstance(error, Unreadable) and "BytesIO" in str(error)


def encode_images(folder: Path, text: str, paths: Sequence[str], label: str) -> tuple[list[int], dict[str, Any]]:
    """The ids of a prompt with its placeholders, and the fields of its `PromptImages` that follow from the images.

    text: what the chat template made, with one marker an image.

    Raises:
        UsageError: an image cannot be read, the markers are not as many as the images, or the checkpoint has no
            processor that can be used here.
        MissingExtra: the processor needs a package that is not installed.
    """
    processor = _processor_of(folder)
    marker = getattr(processor, "image_token", None)
    if isinstance(marker, str) and text.count(marker) != len(paths):
        raise UsageError(
            f"{label} holds {len(paths)} images, and its text has the marker {marker} {text.count(marker)} times: the "
            "chat template leaves images out, or the text itself holds the marker; fix the template or the text"
        )
    digests = [read_image(Path(path), label)[1] for path in paths]
    try:
        inputs = _inputs(folder, text, tuple(paths), tuple(digests))
    except UsageError:
        raise
    except Exception as error:  # a checkpoint's processor raises what it likes
        raise UsageError(
            f"the processor of {folder} fails on {label} ({message_of(error)}); fix its images or its messages"
        ) from error
    token_ids: list[int] = inputs["input_ids"][0].tolist()
    num_tokens = _num_placeholders(folder, token_ids)
    if not num_tokens:
        raise UsageError(
            f"the processor of {folder} makes no placeholder for the images of {label}, or config.json does not name "
            "their token; give --model a vision-language checkpoint of transformers"
        )
    return token_ids, {"digests": digests, "pixels": pixel_digest([inputs[_PIXELS]]), "num_tokens": num_tokens}


def model_inputs(images: PromptImages, num_tokens: int, takes: Container[str]) -> "dict[str, torch.Tensor]":
    """Further arguments of a model's forward for one sequence of `num_tokens` that begins with the prompt.

    takes: the names of the forward's arguments. What has a value for each token of the prompt is continued with zeros,
    which stand for text.

    Raises:
        UsageError: an image is another than when the run was prepared.
    """
    import torch

    inputs = _checked_inputs(images)
    num_prompt, arguments = inputs["input_ids"].shape[1], {}
    for name, values in inputs.items():
        if name in _TEXT_INPUTS or name not in takes:
            continue
        if tuple(values.shape) == (1, num_prompt):
            values = torch.nn.functional.pad(values, (0, num_tokens - num_prompt))
        arguments[name] = values
    return arguments


def has_same_pixels(images: PromptImages, of_engine: "Sequence[torch.Tensor]") -> bool:
    """Whether an engine's pixel values of a prompt's images, in its dtype, are those of this processor."""
    if not of_engine:
        return False
    own = _checked_inputs(images)[_PIXELS]
    return pixel_digest([own.to(of_engine[0].dtype)]) == pixel_digest(of_engine)


def pixel_digest(tensors: "Iterable[torch.Tensor]") -> str:
    """SHA-256 of the numbers of tensors, one after the other, whatever their shapes."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def processor_template(folder: Path) -> str | None:
    """The chat template that lies with the processor alone, as in older checkpoints."""
    template = getattr(_processor_of(folder), "chat_template", None)
    return template if isinstance(template, str) else None


def processor_facts(folder: Path) -> dict[str, Any]:
    """The class of the checkpoint's processor and the settings of its images, as plain JSON values."""
    processor = _processor_of(folder)
    settings = {
        name: value
        for name, value in processor.image_processor.to_dict().items()
        if isinstance(value, (bool, int, float, str, list, tuple, dict))
    }
    return {"processor": type(processor).__name__, "class": type(processor.image_processor).__name__, **settings}


def text_with_images(tokenizer: Any, folder: Path, token_ids: Sequence[int]) -> str:
    """What the ids decode to, with `SHOWN_AS` for each run of placeholders."""
    ids, parts, run = set(placeholder_ids(read_config(folder))), [], []
    for token_id in [*token_ids, None]:
        if token_id is not None and token_id not in ids:
            run.append(token_id)
            continue
        if run:
            parts.append(str(tokenizer.decode(run)))
            run = []
        if token_id is not None and (not parts or parts[-1] != SHOWN_AS):
            parts.append(SHOWN_AS)
    return "".join(parts)


def open_images(images: PromptImages) -> "list[Image]":
    """The images of a prompt, for an engine. Raises as `read_image`."""
    return [read_image(Path(path), "a prompt")[0] for path in images.paths]


def images_of(prompts: Iterable[EncodedPrompt]) -> list[PromptImages]:
    """Those of the prompts that hold any."""
    return [prompt.images for prompt in prompts if prompt.images is not None]


def _num_placeholders(folder: Path, token_ids: Sequence[int]) -> int:
    ids = set(placeholder_ids(read_config(folder)))
    return sum(token_id in ids for token_id in token_ids)


def _checked_inputs(images: PromptImages) -> Any:
    inputs = _inputs(Path(images.folder), images.text, tuple(images.paths), tuple(images.digests))
    if pixel_digest([inputs[_PIXELS]]) != images.pixels:
        raise UsageError(
            f"{' or '.join(images.paths)} is another image than when the run was prepared; put it back, or make the "
            "run anew"
        )
    return inputs


@lru_cache(maxsize=4)
def _inputs(folder: Path, text: str, paths: tuple[str, ...], digests: tuple[str, ...]) -> Any:
    """What the processor makes; `digests` tell files of one path apart, of which the last is kept."""
    images = [read_image(Path(path), "a prompt")[0] for path in paths]
    return _processor_of(folder)(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")


@lru_cache(maxsize=2)
def _processor_of(folder: Path) -> Any:
    from transformers import AutoProcessor

    try:
        loader: Any = AutoProcessor
        processor = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ImportError as error:
        raise MissingExtra(
            f"the processor of {folder} cannot be loaded ({message_of(error)}), and prompts hold images; install that "
            "package where there is a build for this PyTorch, or give prompts of text"
        ) from error
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise UsageError(
            f"the processor of {folder} cannot be loaded ({message_of(error)}), and prompts hold images; give --model "
            "a folder with its processor's files"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise UsageError(
            f"{folder} has no image processor, and prompts hold images; give --model a vision-language checkpoint with "
            "its processor's files"
        )
    return processor
