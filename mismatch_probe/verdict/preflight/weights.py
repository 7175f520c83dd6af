"""Whether both sides compute with the same weights: the same checkpoint, adapter, quantisation.

`architecture.forward_pass` reports what their configurations make of the forward pass, from what both sides loaded.
"""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final, Literal

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_count, write_many
from mismatch_probe.records.manifest import CheckpointDifference, TensorDifference, WeightsDifference
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides, setting_words

_LARGEST_ERROR: Final = 0.02
"""Relative, of the norm of what is added: rounding the matrices to 16 bit leaves a few thousandths."""


def adapters(sides: Sides) -> Iterator[SettingFinding]:
    """An adapter on one side alone, another one on the other, or one that is applied at another scale.

    Of a server's only the folder and the fingerprint are on record: nobody has read what it holds.
    """
    train, infer = sides.train.get("adapter"), sides.infer.get("adapter")
    if train is None or infer is None:
        if infer is not None:
            yield _one_sided(sides, "the engine", infer, "the training path", "pi")
        if train is not None:
            yield _one_sided(sides, "the training path", train, "the engine", "mu")
    elif train["fingerprint"] != infer["fingerprint"]:
        yield _error(
            f"the two sides compute with other adapters: {_adapter_words(train)} on the training path, "
            f"{_adapter_words(infer)} in the engine",
            "Give engine.adapter and training.adapter the same folder.",
        )
    elif not _are_similar_in_size(train.get("change_norm"), infer.get("change_norm")):
        yield _error(
            f"the same adapter adds {train['change_norm']:.4g} to the training path's weights and "
            f"{infer['change_norm']:.4g} to the engine's (Frobenius norm)",
            "One side scales it otherwise than alpha / rank of its file, or leaves layers out; look for an override.",
        )
    elif "merged" in infer and train["merged"] != infer["merged"]:
        yield SettingFinding(
            level="note",
            setting="adapter",
            what="the adapter is merged into the weights on one side and not merged on the other: the two "
            "round at other places, and agree in FP32",
            advice="Merge it on both sides, or on neither, to measure what that adds.",
        )


def _one_sided(
    sides: Sides, where: str, adapter: Mapping[str, Any], other: str, side: Literal["pi", "mu"]
) -> SettingFinding:
    if sides.load_the_same:
        return _error(
            f"{where} computes with the adapter {adapter['folder']}, and {other} has none",
            "Give both sides the adapter: engine.adapter and training.adapter.",
            side,
        )
    return SettingFinding(
        level="note",
        setting="adapter",
        what=f"{where} computes with the adapter {adapter['folder']}; {other} has none and loads another checkpoint",
        advice="The two agree where that checkpoint has the adapter merged in; FP32 on both sides shows it.",
    )


def _error(what: str, advice: str, side: Literal["pi", "mu"] | None = None) -> SettingFinding:
    return SettingFinding(level="error", side=side, setting="adapter", what=what, advice=advice, code=Code.ADAPTER)


def _adapter_words(facts: Mapping[str, Any]) -> str:
    return f"{facts['folder']} (rank {facts['rank']}, alpha {facts['alpha']:g})" if "rank" in facts else facts["folder"]


def _are_similar_in_size(train: float | None, infer: float | None) -> bool:
    """True also where a side does not know its size."""
    return train is None or infer is None or abs(train - infer) <= _LARGEST_ERROR * max(train, infer)


PLAIN_METHOD: Final = "Unquantized"
"""How vLLM's names of a layer's way to hold plain weights begin."""


def quantized_weights(sides: Sides) -> Iterator[SettingFinding]:
    """What the engine multiplies with quantised weights, and where those come from."""
    quantization, methods = sides.infer.get("quantization"), sides.infer.get("weight_methods")
    if quantization is None:
        return
    if methods and all(name.startswith(PLAIN_METHOD) for name in methods):
        yield SettingFinding(
            level="warning",
            side="mu",
            setting="quantization",
            what=f"the engine was asked for quantization {quantization}, and quantises no layer of this model",
            advice="Take another quantization, or leave it out: the numbers are those of plain weights.",
        )
        return
    facts = sides.infer.get("quantized")
    source = "" if facts is None else f", {_source(facts, 'the engine')}"
    yield SettingFinding(
        level="warning",
        side="mu",
        setting="quantization",
        what=f"the engine's weights are quantised ({quantization}){source}",
        advice="Measure with it off; what it adds is not the dtype's doing.",
        code=Code.ONE_SIDED_DTYPE,
    )


def quantized_sources(sides: Sides) -> Iterator[SettingFinding]:
    """Whether both sides have quantised weights of one source; no finding where the training path has none."""
    train, infer = sides.train.get("quantized"), sides.infer.get("quantized")
    if train is None:
        return
    own = f"the training path's weights are quantised ({train['method']}), {_source(train, 'the training path')}"
    if infer is None:
        what, advice = f"{own}; the engine's are not", "Give both sides the same checkpoint, or quantise on both."
    elif sides.load_the_same and train["source"] == infer["source"] and train["read_as"] == infer["read_as"]:
        yield SettingFinding(
            level="note",
            setting="quantized",
            what=f"{own}; the engine's are the same ones",
            advice="What differs is what each side makes of them: the format of its products and of its activations.",
        )
        return
    else:
        what = f"{own}; the engine's ({infer['method']}) are another source's: {_source(infer, 'the engine')}"
        advice = "Quantise on both sides from the same weights: what is rounded before comes out on another grid."
    yield SettingFinding(level="warning", setting="quantized", what=what, advice=advice, code=Code.ONE_SIDED_DTYPE)


def _source(facts: Mapping[str, Any], who: str) -> str:
    """`as the checkpoint stores them`, or from what they were rounded."""
    if facts["source"] == "checkpoint":
        return "as the checkpoint stores them" + (
            ", and expanded before anything is computed" if facts["expanded"] else ""
        )
    stored_dtype = max(facts["stored"], key=facts["stored"].__getitem__, default=facts["read_as"])
    rounding = f", to which it rounds the stored {stored_dtype} first" if _loses(stored_dtype, facts["read_as"]) else ""
    return f"rounded by {who} at load from {facts['read_as']}{rounding}"


def _loses(stored_dtype: str, read_as: str) -> bool:
    """Whether a format holds less of a number than the one it is stored in."""
    if stored_dtype not in tuple(Dtype):
        return False
    wide, narrow = Dtype.parse(stored_dtype), Dtype.parse(read_as)
    return wide.significand_bits > narrow.significand_bits or wide.exponent_bits > narrow.exponent_bits


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
    names, difference = _names_of_checkpoints(sides), sides.difference
    if difference is None:
        if not sides.load_the_same:
            yield _other_weights(names, "")
        return
    weights = difference.weights
    if weights.are_other:
        yield _other_weights(names, f": {_what_differs(weights)}")
    elif weights.formats is not None:
        yield from _rounding(sides, weights, weights.formats)
    yield from _of_text(names, difference)
    changes = {name: values for name, values in difference.generation.items() if name not in _UNTOUCHED}
    if changes:
        yield _finding_of_weights(
            "note",
            "generation_config",
            f"generation_config.json differs between {names[0]} and {names[1]}: {_values(changes)}",
            "The run gives both sides its own sampling settings; an engine that takes its defaults from this file "
            "samples otherwise.",
        )


def _other_weights(names: tuple[str, str], what_differs: str) -> SettingFinding:
    return _finding_of_weights(
        "error",
        WEIGHTS,
        f"the training path holds the weights of {names[0]} and the engine those of {names[1]}{what_differs}",
        "Push the training path's weights to the engine, or compare two checkpoints on purpose.",
        Code.STALE_WEIGHTS,
    )


def _rounding(sides: Sides, weights: WeightsDifference, formats: tuple[str, str]) -> Iterator[SettingFinding]:
    """The same weights in two formats: they round the side that computes in more digits than its files have."""
    ours, theirs = (Dtype.parse(name) for name in formats)
    is_ours = ours.round_off > theirs.round_off
    stored_dtype, side = (ours, "pi") if is_ours else (theirs, "mu")
    computes_in = sides.train_dtype if is_ours else sides.infer_dtype
    loses = computes_in.round_off < stored_dtype.round_off
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
    parts = []
    if weights.num_other:
        verb = "differs" if weights.num_other == 1 else "differ"
        largest = [_by(tensor) for tensor in weights.largest[:_MOST_NAMED]]
        most = "most " if weights.num_other > len(largest) else ""
        parts.append(
            f"{write_count(weights.num_other)} of {write_many(weights.num_tensors, 'tensor')} {verb} "
            f"({most}{', '.join(largest)})"
        )
    for number, where in ((weights.train_alone, "the training path's"), (weights.infer_alone, "the engine's")):
        if number:
            parts.append(f"{write_many(number, 'tensor')} {'is' if number == 1 else 'are'} in {where} alone")
    if weights.alone:
        parts[-1] += f" ({', '.join(weights.alone[:_MOST_NAMED])})"
    return "; ".join(parts)


def _by(tensor: TensorDifference) -> str:
    """relative is the root mean square of the difference over that of the tensor."""
    return tensor.name if tensor.relative is None else f"{tensor.name} by {float(f'{100 * tensor.relative:.2g}'):g} %"


def _of_text(names: tuple[str, str], difference: CheckpointDifference) -> Iterator[SettingFinding]:
    if difference.tokenizer:
        yield _finding_of_weights(
            "warning",
            "tokenizer",
            f"the tokenizers of {names[0]} and {names[1]} differ: {'; '.join(difference.tokenizer)}",
            f"{_READ_ALIKE}: give both one tokenizer.",
            Code.PROMPT_PREFIX,
        )
    if difference.chat_template:
        yield _finding_of_weights(
            "warning",
            "chat_template",
            f"the chat templates of {names[0]} and {names[1]} differ: {difference.chat_template}",
            f"{_READ_ALIKE}: give both one template.",
            Code.PROMPT_PREFIX,
        )
    for name, code in _OF_IDS.items():
        if name in difference.config:
            yield _finding_of_weights(
                "note" if code is None else "warning",
                name,
                setting_words(name, *difference.config[name]),
                f"{_READ_ALIKE}: give both one config.json.",
                code,
            )


def _values(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {ours} and {theirs}" for name, (ours, theirs) in changes.items())


def _names_of_checkpoints(sides: Sides) -> tuple[str, str]:
    """The last parts of both paths; the whole ones, with the fingerprints, where these are one."""
    assert sides.checkpoints is not None
    train, infer = sides.checkpoints
    names = PurePath(train.name).name, PurePath(infer.name).name
    if names[0] != names[1]:
        return names
    return f"{train.name} ({train.fingerprint})", f"{infer.name} ({infer.fingerprint})"


def _finding_of_weights(
    level: Literal["error", "warning", "note"], setting: str, what: str, advice: str, code: Code | None = None
) -> SettingFinding:
    return SettingFinding(level=level, setting=setting, what=what, advice=advice, code=code)
