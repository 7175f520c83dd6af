"""Whether both sides compute with the same weights: the same adapter, the same quantisation."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.facts import Sides

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
            f"the two sides compute with other adapters: {_told(train)} on the training path, {_told(infer)} in the "
            "engine",
            "Give engine.adapter and training.adapter the same folder.",
        )
    elif not _alike(train.get("change_norm"), infer.get("change_norm")):
        yield _error(
            f"the same adapter adds {train['change_norm']:.4g} to the training path's weights and "
            f"{infer['change_norm']:.4g} to the engine's (Frobenius norm)",
            "One side scales it otherwise than alpha / rank of its file, or leaves layers out; look for an override.",
        )
    elif "merged" in infer and train["merged"] != infer["merged"]:
        yield SettingFinding(
            level="note",
            setting="adapter",
            what="the adapter is merged into the weights on one side and computed beside them on the other: the two "
            "round at other places, and agree in FP32",
            advice="Merge it on both sides, or on neither, to measure what that adds.",
        )


def _one_sided(
    sides: Sides, where: str, held: Mapping[str, Any], other: str, side: Literal["pi", "mu"]
) -> SettingFinding:
    if sides.load_the_same:
        return _error(
            f"{where} computes with the adapter {held['folder']}, and {other} has none",
            "Give both sides the adapter: engine.adapter and training.adapter.",
            side,
        )
    return SettingFinding(
        level="note",
        setting="adapter",
        what=f"{where} computes with the adapter {held['folder']}; {other} has none and loads another checkpoint",
        advice="The two agree where that checkpoint has the adapter merged in; FP32 on both sides tells.",
    )


def _error(what: str, advice: str, side: Literal["pi", "mu"] | None = None) -> SettingFinding:
    return SettingFinding(level="error", side=side, setting="adapter", what=what, advice=advice, code=Code.ADAPTER)


def _told(facts: Mapping[str, Any]) -> str:
    return f"{facts['folder']} (rank {facts['rank']}, alpha {facts['alpha']:g})" if "rank" in facts else facts["folder"]


def _alike(train: float | None, infer: float | None) -> bool:
    """True also where a side cannot tell."""
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
    told = "" if facts is None else f", {_source(facts, 'the engine')}"
    yield SettingFinding(
        level="warning",
        side="mu",
        setting="quantization",
        what=f"the engine's weights are quantised ({quantization}){told}",
        advice="Measure with it off; what it adds is not the dtype's doing.",
        code=Code.ONE_SIDED_DTYPE,
    )


def quantized_sources(sides: Sides) -> Iterator[SettingFinding]:
    """Whether both sides have quantised weights of one source; nothing is said where the training path has none."""
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
    stored = max(facts["stored"], key=facts["stored"].__getitem__, default=facts["read_as"])
    rounded = f", to which it rounds the stored {stored} first" if _loses(stored, facts["read_as"]) else ""
    return f"rounded by {who} at load from {facts['read_as']}{rounded}"


def _loses(stored: str, read_as: str) -> bool:
    """Whether a format holds less of a number than the one it is stored in."""
    if stored not in tuple(Dtype):
        return False
    wide, narrow = Dtype.parse(stored), Dtype.parse(read_as)
    return wide.significand_bits > narrow.significand_bits or wide.exponent_bits > narrow.exponent_bits
