"""Places where one side errs in another way than rounding does, and where a person finds them.

Both sides' own errors are known channel by channel, each in units of its number's size. Rounding gives every channel of
a place much the same error on both sides, whatever the model; a wrong weight, constant or format raises it on one side,
in all channels or in one. A norm's constants also change the length of what it returns, systematically and far below
what rounding does to single numbers; that is seen in the difference of the two scales.

Two formats round the same numbers by other luck, which decides where a channel has few different ones, as behind the
embeddings of a few ids; and FP32 rounds next to nothing compared with 16 bits, so it is no control. Then errors count
from one rounding on, or from what blocks make of many.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mismatch_probe.config.model import PairSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.activations import BLOCK, HEAD, ROTARY_KEYS, ROTARY_QUERIES, Floats, OwnSums, PlaceSums
from mismatch_probe.records.findings import PlaceError, Suspect

_LEAST_UNIT: Final = 300 * 2.0**-24
"""What sums of many FP32 products differ by when added up in another order."""
_FLOOR: Final = 0.1
_FLOOR_OTHER_FORMAT: Final = 1.0
_FLOOR_BESIDE_FP32: Final = 6.0
"""Roundings; the last what the own errors of blocks of clean models were seen to be of, and a little more."""
_TIMES: Final = 2.5
_TIMES_OF_EXTRA_ROUNDING: Final = 1.5
"""Above what one more rounding makes of the same numbers, which is computed."""
_STANDARD_ERRORS: Final = 5.0
_NORMAL_KURTOSIS: Final = 3.0
_SCALE_SHARE: Final = 1 / 30
_SCALE_SHARE_ALONE: Final = 1.0
"""Of a rounding: what weights that are rounded in one format, and otherwise in another, change a length by."""
_SEVERAL: Final = 0.05
_BEYOND_ROUNDING: Final = 4.0
_FEW: Final = 0.5
"""Unfaithful numbers' part of an own error: a quarter of its square."""
_OWN, _UNFAITHFUL, _NEAREST = range(3)
"""Rows of `_roundings`."""
_SIDE_NAMES: Final[dict[PairSide, str]] = {"infer": "the engine", "train": "the training path"}


def rounding_unit(dtype: Dtype) -> float:
    """The relative error that one rounding to a dtype makes on average, or that FP32 sums make.

    Half of the unit roundoff: numbers of all sizes are off by 0.85 of it, in root mean square.
    """
    return max(dtype.round_off / 2, _LEAST_UNIT)


@dataclass(frozen=True)
class ChannelRatio:
    """The worst channel of a place: by how much one side's own error exceeds the other's, and what share does so.

    Worst by how far it exceeds its `threshold`, which is higher where few tokens decide a channel.
    """

    times: float
    channel: int
    side: PairSide
    share: float
    own_error: float
    threshold: float

    @property
    def is_suspect(self) -> bool:
        return self.times > self.threshold


def channel_ratio(infer_sums: OwnSums, train_sums: OwnSums, infer_dtype: Dtype, train_dtype: Dtype) -> ChannelRatio:
    """Own errors by channel, each side's in units of its own rounding, the greater over the less.

    A kernel that chops instead of rounding to nearest errs twice as much, and by a whole spacing where the exact number
    lies just below one that the format has. A channel where that alone makes the difference counts as the same.
    """
    infer, train = _roundings(infer_sums, infer_dtype), _roundings(train_sums, train_dtype)
    floor = _floor(infer_dtype, train_dtype)
    ratio = (infer[_OWN] + floor) / (train[_OWN] + floor)
    either = np.maximum(ratio, 1 / ratio)
    tokens = np.minimum(_deciding_tokens(infer_sums), _deciding_tokens(train_sums))
    threshold = _TIMES * np.exp(_STANDARD_ERRORS / np.sqrt(tokens))
    for own, roundings, dtype in ((infer_sums, infer, infer_dtype), (train_sums, train, train_dtype)):
        by_rounding = _times_of_extra_rounding(own, roundings, dtype, floor)
        threshold = np.maximum(threshold, _TIMES_OF_EXTRA_ROUNDING * by_rounding)
    worse, better = np.where(ratio >= 1, infer, train) + floor, np.where(ratio >= 1, train, infer) + floor
    few_unfaithful = np.minimum(threshold * better[_OWN], floor + _FEW * (worse[_OWN] - floor))
    is_faithful = worse[_UNFAITHFUL] <= few_unfaithful
    is_as_exact_as_nearest = better[_NEAREST] <= _TIMES * better[_OWN]
    either[(either > threshold) & is_faithful & is_as_exact_as_nearest] = 1.0
    channel = int((either / threshold).argmax())
    side: PairSide = "infer" if ratio[channel] >= 1 else "train"
    own_error = (infer if side == "infer" else train)[_OWN, channel]
    share = float((either > threshold).mean())
    return ChannelRatio(float(either[channel]), channel, side, share, float(own_error), float(threshold[channel]))


def find_suspects(
    places: Sequence[PlaceSums], errors: Sequence[PlaceError], infer_dtype: Dtype, train_dtype: Dtype
) -> list[Suspect]:
    """Innermost suspect places, those of the same name in several layers together, gravest first."""
    suspects: list[tuple[PlaceError, PairSide, float, int | None, str]] = []
    for sums, error in zip(places, errors, strict=True):
        infer, train = sums.infer, sums.train
        ratio = channel_ratio(infer.own_by_number, train.own_by_number, infer_dtype, train_dtype)
        between_parts = channel_ratio(infer.between_parts, train.between_parts, infer_dtype, train_dtype)
        if ratio.is_suspect and between_parts.is_suspect:
            channel = ratio.channel if ratio.share < _SEVERAL else None
            suspects.append((error, ratio.side, ratio.times, channel, _ratio_sentence(error, ratio, channel)))
        elif "norm" in sums.place:
            scale = _scale_suspicion(sums, error, infer_dtype, train_dtype)
            if scale is not None:
                suspects.append(scale)
    innermost = [suspect for suspect in suspects if not any(_contains(suspect[0], other[0]) for other in suspects)]
    return _group(innermost)


def _deciding_tokens(own: OwnSums) -> Floats:
    """How many tokens decide each channel's error [C]: all of them where errors are normal, few where few are large."""
    with np.errstate(all="ignore"):
        tokens = _NORMAL_KURTOSIS * own.squares**2 / own.fourths
    return np.clip(np.nan_to_num(tokens, nan=np.inf), 1.0, max(float(own.tokens[0]), 1.0))


def _floor(infer_dtype: Dtype, train_dtype: Dtype) -> float:
    """Roundings that are added to both sides' errors, so that their ratio says something."""
    if infer_dtype == train_dtype:
        return _FLOOR
    beside_fp32 = infer_dtype.rounds_coarsely != train_dtype.rounds_coarsely
    return _FLOOR_BESIDE_FP32 if beside_fp32 else _FLOOR_OTHER_FORMAT


def _roundings(own: OwnSums, dtype: Dtype) -> Floats:
    """Root mean squares [3, C] of each channel's own errors, of the unfaithful ones, and of rounding to nearest."""
    squares = np.stack([own.squares, own.unfaithful, own.nearest]) / max(float(own.tokens[0]), 1.0)
    return np.asarray(np.sqrt(squares) / rounding_unit(dtype))


def _times_of_extra_rounding(own: OwnSums, roundings: Floats, dtype: Dtype, floor: float) -> Floats:
    """By how much one rounding more, or less, changes a norm's own errors [C]; 1 at another place.

    Where a channel has few different numbers, as behind the embeddings of a few ids, that is luck.
    """
    if not own.extra_squares.any():
        return np.ones(1)
    extra = np.sqrt(own.extra_squares / max(float(own.tokens[0]), 1.0)) / rounding_unit(dtype)
    times = (extra + floor) / (roundings[_NEAREST] + floor)
    return np.asarray(np.maximum(times, 1 / times))


def _scale_suspicion(
    sums: PlaceSums, error: PlaceError, infer_dtype: Dtype, train_dtype: Dtype
) -> tuple[PlaceError, PairSide, float, int | None, str] | None:
    difference, standard_error = _scale_difference(sums)
    unit = max(rounding_unit(infer_dtype), rounding_unit(train_dtype))
    share = _SCALE_SHARE if infer_dtype == train_dtype else _SCALE_SHARE_ALONE
    extra_rounding = max(abs(error.infer.scale_of_extra_rounding), abs(error.train.scale_of_extra_rounding))
    limit = extra_rounding + max(_STANDARD_ERRORS * standard_error, share * unit)
    if not abs(difference) > limit:
        return None
    side: PairSide = "infer" if abs(error.infer.scale.value) >= abs(error.train.scale.value) else "train"
    sentence = (
        f"{error.place}: what {_SIDE_NAMES[side]} returns is {abs(difference):.1e} times its length longer or shorter "
        "than on the other side, on every token alike, and rounding once more explains less: look at the norm's "
        "epsilon and weights"
    )
    return error, side, abs(difference) / limit * _TIMES, None, sentence


def _scale_difference(sums: PlaceSums) -> tuple[float, float]:
    """How much the two scales differ, with its standard error: the larger of those over tokens and over channels.

    Each token's length makes luck of its own, and so does a channel in which all tokens round alike, as behind a sink.
    """
    sides = sums.infer.own_by_number, sums.train.own_by_number
    infer, train = (own.along.sum() / own.targets.sum() if own.targets.any() else 0.0 for own in sides)
    over_tokens = math.hypot(*(_over_tokens(own) for own in sides))
    over_channels = math.hypot(*(_over_channels(own) for own in sides))
    return float(infer - train), max(over_tokens, over_channels)


def _over_tokens(own: OwnSums) -> float:
    """Standard error of `along` over `targets`, a ratio of sums over independent tokens (Cochran, 1977, eq. 6.13)."""
    squares, products, target_squares = own.token_moments.tolist()
    return _error_of_ratio(own, squares, products, target_squares)


def _over_channels(own: OwnSums) -> float:
    """The same over independent channels."""
    products = (own.along @ own.along, own.along @ own.targets, own.targets @ own.targets)
    return _error_of_ratio(own, *map(float, products))


def _error_of_ratio(own: OwnSums, squares: float, products: float, target_squares: float) -> float:
    total = float(own.targets.sum())
    if not total:
        return math.inf
    scale = float(own.along.sum()) / total
    return math.sqrt(max(squares - 2 * scale * products + scale**2 * target_squares, 0.0)) / total


def _ratio_sentence(error: PlaceError, ratio: ChannelRatio, channel: int | None) -> str:
    side, other = _SIDE_NAMES[ratio.side], _SIDE_NAMES["train" if ratio.side == "infer" else "infer"]
    where = error.place if channel is None else f"{error.place}, output {channel}"
    if ratio.own_error < _BEYOND_ROUNDING:
        return f"{where}: {other} computes it in higher precision than {side}, whose own error is rounding"
    return (
        f"{where}: {side} computes something else: on the same input its error is {ratio.times:.3g} times that of "
        f"{other} and beyond rounding"
    )


def _contains(outer: PlaceError, inner: PlaceError) -> bool:
    if outer.layer != inner.layer or outer.place == inner.place:
        return False
    return outer.place == BLOCK or inner.place.startswith(f"{outer.place}.")


def _group(candidates: list[tuple[PlaceError, PairSide, float, int | None, str]]) -> list[Suspect]:
    groups: dict[tuple[str, PairSide], list[tuple[PlaceError, PairSide, float, int | None, str]]] = {}
    for candidate in candidates:
        groups.setdefault((candidate[0].place, candidate[1]), []).append(candidate)
    suspects = []
    for (place, side), members in groups.items():
        worst = max(members, key=lambda member: member[2])
        suspects.append(
            Suspect(
                place=place,
                layers=[error.layer for error, *_ in members if error.layer is not None],
                train_names=[error.train_name for error, *_ in members],
                infer_names=[error.infer_name for error, *_ in members if error.infer_name is not None],
                side=side,
                times=worst[2],
                channel=worst[3],
                sentence=worst[4],
            )
        )
    return sorted(suspects, key=lambda suspect: -suspect.times)


_ROTARY = "self_attn.rotary_emb"
_NOT_HELD_AGAINST = ("rotary", ".experts")
"""Parts of what is seen as a whole."""


@dataclass(frozen=True)
class PlaceNames:
    """`train_layers` and `infer_layers` are the paths of the decoder layers, `inside` vLLM's names by place."""

    train_layers: Sequence[str]
    infer_layers: Sequence[str]
    inside: Mapping[str, str]

    @classmethod
    def of(cls, train: Mapping[str, Any], infer: Mapping[str, Any]) -> "PlaceNames":
        return cls(train["layer_paths"], infer["layer_paths"], infer["names"])

    def train(self, layer: int | None, place: str) -> str:
        return _name(self.train_layers, layer, place)

    def infer(self, layer: int | None, place: str) -> str | None:
        """None where vLLM has no module of its own for it."""
        if layer is None or place == BLOCK:
            return _name(self.infer_layers, layer, place)
        inside = self.inside.get(_ROTARY if place in (ROTARY_QUERIES, ROTARY_KEYS) else place)
        return None if inside is None else _name(self.infer_layers, layer, inside)

    def modules_without_place(self, places: set[str]) -> list[str]:
        """Modules of vLLM's layers that no place of the training path was compared with."""
        return sorted(
            name
            for place, name in self.inside.items()
            if place not in places and not any(part in place for part in _NOT_HELD_AGAINST)
        )


def _name(layers: Sequence[str], layer: int | None, place: str) -> str:
    if layer is None:
        return place if place == HEAD else layers[0].rpartition("layers.")[0] + place
    return layers[layer] if place == BLOCK else f"{layers[layer]}.{place}"
