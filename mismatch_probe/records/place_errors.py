"""Sums at every place by sequence and by channel, passed from the reference's walk to the statistics in one file."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_probe.records.atomic import replacing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ErrorSums:
    """Sums over the tokens of each sequence [N] of what a side computed against a target; `largest` is over all."""

    tokens: Floats
    target_squares: Floats
    side_squares: Floats
    error_squares: Floats
    along: Floats
    largest: Floats


@dataclass(frozen=True)
class SideSums:
    """Against the reference, against FP32 on the side's own input, and of the latter by channel [C].

    `target_fourths` are sums of fourth powers: what they are to the squares tells how many tokens decide a channel.
    """

    total: ErrorSums
    own: ErrorSums
    own_channels: Floats
    target_channels: Floats
    target_fourths: Floats
    channel_tokens: Floats


_BY_CHANNEL = ("own_channels", "target_channels", "target_fourths", "channel_tokens")


@dataclass(frozen=True)
class PlaceSums:
    layer: int | None
    place: str
    infer: SideSums
    train: SideSums
    between: ErrorSums


@dataclass(frozen=True)
class RouterSums:
    """Tokens [N], and those whose experts differ: of each side from FP32, of the sides from each other."""

    layer: int
    tokens: Floats
    infer: Floats
    train: Floats
    sides: Floats


def write_sums(path: Path, places: list[PlaceSums], routers: list[RouterSums]) -> None:
    """Write everything as one npz file, whole or not at all."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for kind, records in (("place", places), ("router", routers)):
        for number, record in enumerate(records):
            _flatten(record, f"{kind}-{number}", arrays)
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_sums(path: Path) -> tuple[list[PlaceSums], list[RouterSums]]:
    with np.load(path, allow_pickle=False) as arrays:
        flat = {name: arrays[name] for name in arrays.files}
    return _records(flat, "place", _place), _records(flat, "router", _router)


def _flatten(record: Any, prefix: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        name = f"{prefix}/{field.name}"
        if hasattr(value, "__dataclass_fields__"):
            _flatten(value, name, arrays)
        else:
            arrays[name] = np.asarray(-1 if value is None else value)


def _records(flat: Mapping[str, npt.NDArray[Any]], kind: str, make: Any) -> list[Any]:
    count = sum(name.startswith(f"{kind}-") and name.endswith("/layer") for name in flat)
    return [make(flat, f"{kind}-{number}/") for number in range(count)]


def _place(flat: Mapping[str, npt.NDArray[Any]], at: str) -> PlaceSums:
    layer = int(flat[f"{at}layer"])
    infer, train = (
        SideSums(
            _errors(flat, f"{at}{side}/total/"),
            _errors(flat, f"{at}{side}/own/"),
            *(flat[f"{at}{side}/{name}"] for name in _BY_CHANNEL),
        )
        for side in ("infer", "train")
    )
    between = _errors(flat, f"{at}between/")
    return PlaceSums(None if layer < 0 else layer, str(flat[f"{at}place"]), infer, train, between)


def _router(flat: Mapping[str, npt.NDArray[Any]], at: str) -> RouterSums:
    return RouterSums(int(flat[f"{at}layer"]), *(flat[at + name] for name in ("tokens", "infer", "train", "sides")))


def _errors(flat: Mapping[str, npt.NDArray[Any]], at: str) -> ErrorSums:
    return ErrorSums(**{field.name: flat[at + field.name] for field in fields(ErrorSums)})
