"""What two checkpoints' tokenizers and chat templates differ in, whatever program wrote their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mismatch_probe.errors import UsageError
from mismatch_probe.inert import plain, shortened
from mismatch_probe.provenance.checkpoint import read_description
from mismatch_probe.reading import Unreadable, read_text

_TOKENIZER: Final = "tokenizer.json"
_SETTINGS: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_OTHER_FILES: Final = ("tokenizer.model", "vocab.json", "merges.txt")
"""Read where there is no tokenizer.json."""

_WITHOUT_EFFECT: Final = ("version", "truncation", "padding")
"""Parts of tokenizer.json that change no id of a prompt that is encoded alone."""

_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_SWITCHES: Final = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "legacy")
"""Compared where both files set them, since programs differ in which defaults they write."""

_QUOTED: Final = 24


def tokenizer_differences(train: Path, infer: Path) -> list[str]:
    """Each in a few words, such as `tokenizer.json: vocabulary (3 tokens)`; none of two that encode alike.

    Raises:
        UsageError: a file holds no JSON object.
    """
    return [*_of_tokenizers(train, infer), *_of_settings(train, infer)]


def template_difference(train: Path, infer: Path) -> str:
    """Where the two chat templates part, in a few words; empty where they are the same.

    Raises:
        UsageError: a file cannot be read.
    """
    ours, theirs = _template(train), _template(infer)
    if ours == theirs:
        return ""
    if not ours or not theirs:
        return "only the training path's has one" if ours else "only the engine's has one"
    place = next(
        (number for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)) if mine != its),
        min(len(ours), len(theirs)),
    )
    return f"from character {place + 1:,} on: {_quoted(ours, place)} and {_quoted(theirs, place)}"


def _of_tokenizers(train: Path, infer: Path) -> list[str]:
    paths = train / _TOKENIZER, infer / _TOKENIZER
    if not all(path.exists() for path in paths):
        return [name for name in _OTHER_FILES if _bytes(train / name) != _bytes(infer / name)]
    if _bytes(paths[0]) == _bytes(paths[1]):
        return []
    ours, theirs = (read_description(path) or {} for path in paths)
    return [
        f"{_TOKENIZER}: {part.replace('_', ' ')}"
        for part in dict.fromkeys((*ours, *theirs))
        if part not in (*_WITHOUT_EFFECT, "model") and _plain(ours.get(part)) != _plain(theirs.get(part))
    ] + [f"{_TOKENIZER}: {part}" for part in _of_models(ours.get("model"), theirs.get("model"))]


def _of_models(ours: Any, theirs: Any) -> list[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return [] if ours == theirs else ["model"]
    differing = []
    for part in dict.fromkeys((*ours, *theirs)):
        mine, its = ours.get(part), theirs.get(part)
        if mine == its or (part == "merges" and _merges(mine) == _merges(its)):
            continue
        if isinstance(mine, Mapping) and isinstance(its, Mapping):
            number = sum(mine.get(token) != its.get(token) for token in {**mine, **its})
            differing.append(f"{part} ({number:,} token{'' if number == 1 else 's'})")
        else:
            differing.append(part.replace("_", " "))
    return differing


def _merges(merges: Any) -> Any:
    """Older files write a merge as one text."""
    return (
        [" ".join(pair) if isinstance(pair, list) else pair for pair in merges] if isinstance(merges, list) else merges
    )


def _of_settings(train: Path, infer: Path) -> list[str]:
    ours, theirs = (read_description(folder / _SETTINGS) or {} for folder in (train, infer))
    both = [name for name in _SWITCHES if None not in (ours.get(name), theirs.get(name))]
    values = [(name, _plain(ours.get(name)), _plain(theirs.get(name))) for name in (*_TOKENS, *both)]
    return [f"{name} is {_written(mine)} and {_written(its)}" for name, mine, its in values if mine != its]


def _template(folder: Path) -> str:
    """A file of its own stands before the one in the tokenizer's settings; jinja drops one line break at its end."""
    path = folder / _TEMPLATE
    try:
        text: Any = (
            read_text(path) if path.exists() else (read_description(folder / _SETTINGS) or {}).get("chat_template")
        )
    except Unreadable as error:
        raise UsageError(f"{path} cannot be read ({error}): give an intact checkpoint") from error
    return "" if text is None else str(text).removesuffix("\n")


def _plain(value: Any) -> Any:
    """A token by its text, which some programs write beside its properties."""
    return value["content"] if isinstance(value, Mapping) and "content" in value else value


def _written(value: Any) -> str:
    return "not set" if value is None else shortened(plain(str(value)), _QUOTED, keep="start")


def _quoted(text: str, place: int) -> str:
    return f"`{plain(shortened(text[place:], _QUOTED, keep='start'))}`" if place < len(text) else "its end"


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give an intact checkpoint") from error
