"""From sums at every place to errors with intervals, and from log-probs to the token KL they explain."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import PairSide
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.localize.suspects import PlaceNames, channel_ratio
from mismatch_probe.records.findings import PlaceError, RouterDecisions, SideError
from mismatch_probe.records.sequences import ErrorSums, PlaceSums, RouterSums, SideSums
from mismatch_probe.stats.estimator import Estimator, map_estimate
from mismatch_probe.stats.intervals import Interval, Scale, ratio
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Sequences

SIDES: Final[tuple[PairSide, PairSide]] = ("infer", "train")


def estimator_of(rollouts: pa.Table, counts: Sequence[int], level: float) -> Estimator:
    """Over the first `len(counts)` responses, with so many tokens each; samples of one prompt are one cluster."""
    prompts = rollouts["prompt_id"].to_pylist()[: len(counts)]
    clusters = np.unique(prompts, return_inverse=True)[1]
    return Estimator(Sequences.of_lengths(counts, clusters), level)


def token_kl(estimator: Estimator, log_pi: Floats, log_mu: Floats) -> tuple[Estimate | None, Estimate | None]:
    """k3 and mean abs(d) of response tokens [T]."""
    diff = log_pi - log_mu
    return estimator.mean(k3_terms(diff), "token", Scale.POSITIVE), estimator.mean(
        np.abs(diff), "token", Scale.POSITIVE
    )


def place_errors(
    places: Sequence[PlaceSums], estimator: Estimator, names: PlaceNames, settings: LocalizeSettings
) -> list[PlaceError]:
    """
    Raises:
        BrokenRecord: a side's activations are not finite, so there is no error to measure.
    """
    errors = []
    for place in places:
        _require_finite(place, names, settings)
        by_number = place.infer.own_by_number, place.train.own_by_number
        worst = channel_ratio(*by_number, settings.infer_dtype, settings.train_dtype)
        errors.append(
            PlaceError(
                layer=place.layer,
                place=place.place,
                train_name=names.train(place.layer, place.place),
                infer_name=names.infer(place.layer, place.place),
                infer=_side_error(place.infer, estimator),
                train=_side_error(place.train, estimator),
                between=_relative(place.between),
                own_ratio=worst.times,
                own_ratio_channel=worst.channel,
                own_ratio_side=worst.side,
            )
        )
    return errors


def router_decisions(routers: Sequence[RouterSums], estimator: Estimator) -> list[RouterDecisions]:
    return [
        RouterDecisions(
            layer=router.layer,
            **{
                name: estimator.share_of_totals(
                    estimator.totals(getattr(router, name), "sequence"),
                    estimator.totals(router.tokens, "sequence"),
                    "token",
                )
                for name in ("infer", "train", "sides")
            },
        )
        for router in routers
    ]


def enters(blocks: Sequence[PlaceError]) -> dict[PairSide, str]:
    """The block of each side that adds most, relative to the stream it adds to."""
    return {side: max(blocks, key=lambda block: getattr(block, side).own.value).train_name for side in SIDES}


def first_difference(errors: Sequence[PlaceError]) -> str | None:
    """The first place in the order of the pass where the sides are not the same bit for bit."""
    return next((error.train_name for error in errors if error.between > 0), None)


def _require_finite(place: PlaceSums, names: PlaceNames, settings: LocalizeSettings) -> None:
    for side, who, dtype in (
        (place.infer, "the engine", settings.infer_dtype),
        (place.train, "the training path", settings.train_dtype),
    ):
        if not np.isfinite(side.total.error_squares).all():
            raise BrokenRecord(
                f"what {who} computes at {names.train(place.layer, place.place)} is not finite in {dtype}; "
                "mismatch-probe headroom says what does not fit, and another dtype fixes it"
            )


def _side_error(side: SideSums, estimator: Estimator) -> SideError:
    own = side.own_by_number
    return SideError(
        total=_relative_estimate(side.total, estimator),
        own=_relative_estimate(side.own, estimator),
        scale=_ratio_of(own.sequence_along, own.sequence_targets, Scale.SIGNED, estimator),
        cosine=_cosine(side.total),
        largest=float(side.total.largest[0]),
    )


def _relative_estimate(sums: ErrorSums, estimator: Estimator) -> Estimate:
    return map_estimate(_ratio_of(sums.error_squares, sums.tokens, Scale.POSITIVE, estimator), math.sqrt)


def _ratio_of(numerator: Floats, denominator: Floats, scale: Scale, estimator: Estimator) -> Estimate:
    """0 where the denominator is."""
    columns = [_clusters(numerator, estimator), _clusters(denominator, estimator)]
    estimate = estimator.smooth(ratio, columns, "token", scale)
    return estimate if estimate is not None else estimator.present(Interval(0.0, 0.0, 0.0), "token")


def _clusters(values: Floats, estimator: Estimator) -> Floats:
    return estimator.totals(values, "sequence")


def _relative(sums: ErrorSums) -> float:
    tokens = float(sums.tokens.sum())
    return float(np.sqrt(sums.error_squares.sum() / tokens)) if tokens else 0.0


def _cosine(sums: ErrorSums) -> float:
    """From |a|, |b| and (a - b) . b."""
    target, side = sums.target_squares.sum(), sums.side_squares.sum()
    dot = sums.along.sum() + target
    return float(dot / np.sqrt(target * side)) if target and side else 0.0
