"""Two checkpoints in one pair: whether weights, tokenizer, chat template and what else describes them are the same.

What their configurations make of the forward pass is told by `architecture.forward_pass`, from what both sides loaded.
"""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final, Literal

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_count, write_many
from mismatch_probe.records.manifest import CheckpointDifference, TensorDifference, WeightsDifference
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.facts import Sides, setting_words

WEIGHTS: Final = "checkpoint"
TEXT: Final = ("tokenizer", "chat_template", "bos_token_id")
"""Settings of how text becomes ids. A run encodes its prompts once, so both sides read the same ids all the same."""

_OF_IDS: Final[dict[str, Code | None]] = {
    "bos_token_id": Code.PROMPT_PREFIX,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Keys of config.json that no forward pass reads."""
_UNTOUCHED: Final = ("transformers_version", "_from_model_config")
_MOST_NAMED: Final = 3
_READ_ALIKE: Final = "Both sides read the same token ids here; a stack that encodes text on each side reads two prompts"


def checkpoints(sides: Sides) -> Iterator[SettingFinding]:
    """Nothing where both sides load one checkpoint, or two that were not compared and say that they are the same."""
    if sides.checkpoints is None:
        return
    names, difference = _names(sides), sides.difference
    if difference is None:
        if not sides.load_the_same:
            yield _other_weights(names, "")
        return
    weights = difference.weights
    if weights.are_other:
        yield _other_weights(names, f": {_what_differs(weights)}")
    elif weights.formats is not None:
        yield from _rounded(sides, weights, weights.formats)
    yield from _of_text(names, difference)
    changed = {name: values for name, values in difference.generation.items() if name not in _UNTOUCHED}
    if changed:
        yield _finding(
            "note",
            "generation_config",
            f"generation_config.json differs between {names[0]} and {names[1]}: {_values(changed)}",
            "The run gives both sides its own sampling settings; an engine that takes its defaults from this file "
            "samples otherwise.",
        )


def _other_weights(names: tuple[str, str], what_differs: str) -> SettingFinding:
    return _finding(
        "error",
        WEIGHTS,
        f"the training path holds the weights of {names[0]} and the engine those of {names[1]}{what_differs}",
        "Push the training path's weights to the engine, or take the difference as what was asked for.",
        Code.STALE_WEIGHTS,
    )


def _rounded(sides: Sides, weights: WeightsDifference, formats: tuple[str, str]) -> Iterator[SettingFinding]:
    """The same weights in two formats: they round the side that computes in more digits than its files have."""
    ours, theirs = (Dtype.parse(name) for name in formats)
    is_ours = ours.round_off > theirs.round_off
    stored, side = (ours, "pi") if is_ours else (theirs, "mu")
    computes_in = sides.train_dtype if is_ours else sides.infer_dtype
    loses = computes_in.round_off < stored.round_off
    yield SettingFinding(
        level="warning" if loses else "note",
        side="pi" if side == "pi" else "mu",
        setting=WEIGHTS,
        what=f"{_of(weights.num_rounded, weights.num_tensors)} stored in {ours} for the training path and in {theirs} "
        "for the engine; they are equal up to that rounding",
        advice="Give both sides one checkpoint to measure without it.",
        code=Code.ONE_SIDED_DTYPE if loses else None,
    )


def _of(number: int, of_all: int) -> str:
    return f"{write_count(number)} of {write_many(of_all, 'tensor')} {'is' if number == 1 else 'are'}"


def _what_differs(weights: WeightsDifference) -> str:
    """`1 of 272 tensors differs (model.norm.weight by 5 %)`."""
    said = []
    if weights.num_other:
        verb = "differs" if weights.num_other == 1 else "differ"
        named = [_by(tensor) for tensor in weights.largest[:_MOST_NAMED]]
        most = "most " if weights.num_other > len(named) else ""
        said.append(
            f"{write_count(weights.num_other)} of {write_many(weights.num_tensors, 'tensor')} {verb} "
            f"({most}{', '.join(named)})"
        )
    for number, where in ((weights.train_alone, "the training path's"), (weights.infer_alone, "the engine's")):
        if number:
            said.append(f"{write_many(number, 'tensor')} {'is' if number == 1 else 'are'} in {where} alone")
    if weights.alone:
        said[-1] += f" ({', '.join(weights.alone[:_MOST_NAMED])})"
    return "; ".join(said)


def _by(tensor: TensorDifference) -> str:
    """relative is the root mean square of the difference over that of the tensor."""
    return tensor.name if tensor.relative is None else f"{tensor.name} by {float(f'{100 * tensor.relative:.2g}'):g} %"


def _of_text(names: tuple[str, str], difference: CheckpointDifference) -> Iterator[SettingFinding]:
    if difference.tokenizer:
        yield _finding(
            "warning",
            "tokenizer",
            f"the tokenizers of {names[0]} and {names[1]} differ: {'; '.join(difference.tokenizer)}",
            f"{_READ_ALIKE}: give both one tokenizer.",
            Code.PROMPT_PREFIX,
        )
    if difference.chat_template:
        yield _finding(
            "warning",
            "chat_template",
            f"the chat templates of {names[0]} and {names[1]} differ: {difference.chat_template}",
            f"{_READ_ALIKE}: give both one template.",
            Code.PROMPT_PREFIX,
        )
    for name, code in _OF_IDS.items():
        if name in difference.config:
            yield _finding(
                "note" if code is None else "warning",
                name,
                setting_words(name, *difference.config[name]),
                f"{_READ_ALIKE}: give both one config.json.",
                code,
            )


def _values(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {ours} and {theirs}" for name, (ours, theirs) in changed.items())


def _names(sides: Sides) -> tuple[str, str]:
    """The last parts of both paths; the whole ones, with the fingerprints, where these are one."""
    assert sides.checkpoints is not None
    train, infer = sides.checkpoints
    names = PurePath(train.name).name, PurePath(infer.name).name
    if names[0] != names[1]:
        return names
    return f"{train.name} ({train.fingerprint})", f"{infer.name} ({infer.fingerprint})"


def _finding(
    level: Literal["error", "warning", "note"], setting: str, what: str, advice: str, code: Code | None = None
) -> SettingFinding:
    return SettingFinding(level=level, setting=setting, what=what, advice=advice, code=code)
