"""Sums at every place by sequence and by channel, passed from the reference's walk to the statistics in one file."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mismatch_probe.config.nested import flat, nested
from mismatch_probe.records.atomic import replacing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ErrorSums:
    """Sums over the tokens of each sequence [N] of what a side computed against a target, relative token by token.

    A token's squares are over the square of its target's length, so that each token counts alike.
    """

    tokens: Floats
    target_squares: Floats
    """1 for each token whose target is not zero."""
    side_squares: Floats
    error_squares: Floats
    along: Floats
    """The error along the target."""
    largest: Floats
    """Of all errors, in units of the token's root mean square."""


@dataclass(frozen=True)
class OwnSums:
    """Sums of own errors, each in units of its number's size; by channel [C] and by sequence [N].

    `squares` and `fourths` are powers of the errors: what one is to the other tells how many tokens decide a channel.
    `along` over `targets` is how much longer the output is than FP32 makes it.
    """

    tokens: Floats
    squares: Floats
    fourths: Floats
    along: Floats
    targets: Floats
    sequence_along: Floats
    sequence_targets: Floats
    token_moments: Floats
    """[3]: sums over tokens of the squares and products of a token's `along` and `targets`."""


@dataclass(frozen=True)
class SideSums:
    """Against the reference, against FP32 on the side's own input, and of the latter number by number."""

    total: ErrorSums
    own: ErrorSums
    own_by_number: OwnSums


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
    tables = {f"places.{number}": asdict(place) for number, place in enumerate(places)}
    tables |= {f"routers.{number}": asdict(router) for number, router in enumerate(routers)}
    arrays = {name: np.asarray(-1 if value is None else value) for name, value in flat(tables)}
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_sums(path: Path) -> tuple[list[PlaceSums], list[RouterSums]]:
    with np.load(path, allow_pickle=False) as arrays:
        tables = nested({name: arrays[name] for name in arrays.files})
    places, routers = (list(tables.get(kind, {}).values()) for kind in ("places", "routers"))
    return [_place(**place) for place in places], [
        RouterSums(**{**router, "layer": int(router["layer"])}) for router in routers
    ]


def _place(layer: Floats, place: Floats, between: dict[str, Floats], **sides: dict[str, Any]) -> PlaceSums:
    infer, train = (
        SideSums(
            ErrorSums(**sides[side]["total"]), ErrorSums(**sides[side]["own"]), OwnSums(**sides[side]["own_by_number"])
        )
        for side in ("infer", "train")
    )
    return PlaceSums(None if layer < 0 else int(layer), str(place), infer, train, ErrorSums(**between))
