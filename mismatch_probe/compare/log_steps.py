"""A log by its steps: the metrics of each step and weight version, and how the KL grows over them."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.records.sequences import weights_order
from mismatch_probe.records.summary import StepSummary
from mismatch_probe.stats.growth import step_growth
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate, StepGrowth

StepKey = tuple[int | None, str | None]

MOST_ROWS: Final = 500

STEP_METRICS: Final = (
    "abs_logprob_diff",
    "kl_k1",
    "kl_k3",
    "is_ratio_mean_token",
    "outside_band_0.8_1.25",
    "ess_token",
    "ess_seq",
)


def over_steps(data: PairData, level: float) -> list[StepSummary]:
    """The metrics of each step and weight version, in order; none where there is one step, or none is known.

    Where generation runs ahead of training, several weight versions sample the responses of one step: a deviation that
    grows with the number of versions between is staleness, and the deviation of the newest version is not. Of very many
    steps, neighbours are combined.
    """
    keys = step_keys(data)
    order = sorted(set(keys), key=step_order)
    if data.pair is None or len(order) < 2:
        return []
    length = math.ceil(len(order) / MOST_ROWS)
    stretches = [order[start : start + length] for start in range(0, len(order), length)]
    number = {key: place for place, stretch in enumerate(stretches) for key in stretch}
    places = np.asarray([number[key] for key in keys])
    rows = []
    for place, stretch in enumerate(stretches):
        part = data.pair.of_tokens(data.pair.sequences.spread(places == place))
        assert part is not None
        metrics, _ = pair_metrics(part, level, STEP_METRICS)
        rows.append(_stretch_summary(stretch, metrics))
    return rows


def last_step(data: PairData) -> int | None:
    """The last step of a log of several; None where there is one step, or none is known."""
    steps = {step for step, _ in step_keys(data) if step is not None}
    return max(steps) if len(steps) > 1 else None


def _stretch_summary(stretch: Sequence[StepKey], metrics: dict[str, Estimate]) -> StepSummary:
    (first, version), (last, _) = stretch[0], stretch[-1]
    return StepSummary(
        step=first,
        last_step=None if last == first else last,
        weight_version=version if all(other == version for _, other in stretch) else None,
        metrics=metrics,
    )


def growth_over_steps(data: PairData, level: float) -> StepGrowth | None:
    """How the KL grows over the steps, in the newest weights of each, so that staleness moves nothing; None where it
    does not grow, or no steps are known.
    """
    keys = step_keys(data)
    if data.pair is None or not keys:
        return None
    newest = {key[0]: key for key in sorted(set(keys), key=step_order)}
    is_newest = np.asarray([key == newest[key[0]] for key in keys])
    part = data.pair.of_tokens(data.pair.sequences.spread(is_newest))
    return None if part is None else step_growth(part, level)


def step_keys(data: PairData) -> list[StepKey]:
    """Step and weight version of each usable response; none where the responses are of no log."""
    if "step" not in data.rollouts.column_names:
        return []
    steps, versions = (data.rollouts[name].take(data.rows).to_pylist() for name in ("step", "weight_version"))
    return list(zip(steps, versions, strict=True))


def step_order(key: StepKey) -> tuple[int, int, str]:
    """What sorts the keys by step, and within a step from the oldest weights to the newest."""
    step, version = key
    return (-1 if step is None else step, *weights_order(version))
