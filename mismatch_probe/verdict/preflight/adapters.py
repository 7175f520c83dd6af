"""Whether both sides compute with the same LoRA adapter, applied alike."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.sides import Sides

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
