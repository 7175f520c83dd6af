"""What a limit can be put on in the documents of `headroom` and `localize`: one exact number each."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.headroom import Headroom, HeadroomCode
from mismatch_probe.records.localize import Localization

_FITS = (HeadroomCode.FITS, HeadroomCode.FITS_WITH_LOSS_SCALE)
_WEIGHTS_ONLY = "it was made with --weights-only"
_NUM_LOSS_SCALES = 25


@dataclass(frozen=True)
class FiledMetric:
    """`read` gives the value, or why the document has none; it lies between `least` and `most`."""

    read: Callable[[Any], float | str]
    least: float
    most: float


def _fits(headroom: Headroom) -> float | str:
    if headroom.activations is None and headroom.verdict.code in _FITS:
        return _WEIGHTS_ONLY
    return float(headroom.verdict.code in _FITS)


def _margin_bits(headroom: Headroom) -> float | str:
    if headroom.activations is None:
        return _WEIGHTS_ONLY
    largest = [headroom.weights.total.largest, *(result.largest or 0.0 for result in headroom.activations.tightest)]
    return math.log2(Dtype.FP16.largest / max(largest)) if max(largest) > 0 else "every weight and result is 0"


def _loss_scales(headroom: Headroom) -> float | str:
    if headroom.plain is None:
        return _WEIGHTS_ONLY
    low, high = headroom.plain.from_exponent, headroom.plain.to_exponent
    return 0.0 if low is None or high is None else float(high - low + 1)


def _suspects(localization: Localization) -> float | str:
    return float(len(localization.suspects))


def _largest_share(localization: Localization) -> float | str:
    if not localization.settings.interventions:
        return "it was made with --no-interventions"
    ranked = [] if localization.interventions is None else localization.interventions.ranked
    return max((intervention.removed.value for intervention in ranked), default=0.0)


HEADROOM = {
    "headroom_fits": FiledMetric(_fits, 0.0, 1.0),
    "headroom_margin_bits": FiledMetric(_margin_bits, -math.inf, math.inf),
    "headroom_loss_scales": FiledMetric(_loss_scales, 0.0, _NUM_LOSS_SCALES),
}
LOCALIZE = {
    "localize_suspects": FiledMetric(_suspects, 0.0, math.inf),
    "localize_largest_share": FiledMetric(_largest_share, -math.inf, 1.0),
}
FILED_METRICS = {**HEADROOM, **LOCALIZE}
