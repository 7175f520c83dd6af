"""How a pair's numbers go over the steps of training, each step and weight version apart."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.records.summary import StepSummary
from mismatch_probe.stats.metrics import pair_metrics
from mismatch_probe.stats.results import Estimate

MOST_ROWS: Final = 500
_MOST_DIGITS: Final = 18
"""Of a weight version that is a number; a longer one is a text."""

STEP_METRICS: Final = (
    "abs_logprob_diff",
    "kl_k1",
    "kl_k3",
    "is_ratio_mean_token",
    "outside_band_0.8_1.25",
    "ess_token",
    "ess_seq",
)


_Key = tuple[int | None, str | None]


def over_steps(data: PairData, level: float) -> list[StepSummary]:
    """Of each step and weight version, in their order; none where the responses are of one, or their steps not known.

    The responses of one step were sampled by several weight versions where generation runs ahead of training: what
    grows with the versions in between is staleness, and what a step's newest version shows is not. Of very many steps,
    neighbouring ones are taken together.
    """
    if data.pair is None or "step" not in data.rollouts.column_names:
        return []
    steps, versions = (data.rollouts[name].take(data.rows).to_pylist() for name in ("step", "weight_version"))
    keys = list(zip(steps, versions, strict=True))
    ordered = sorted(set(keys), key=_order)
    if len(ordered) < 2:
        return []
    length = math.ceil(len(ordered) / MOST_ROWS)
    stretches = [ordered[start : start + length] for start in range(0, len(ordered), length)]
    number = {key: place for place, stretch in enumerate(stretches) for key in stretch}
    places = np.asarray([number[key] for key in keys])
    rows = []
    for place, stretch in enumerate(stretches):
        part = data.pair.of_tokens(data.pair.sequences.spread(places == place))
        assert part is not None
        metrics, _ = pair_metrics(part, level, STEP_METRICS)
        rows.append(_row(stretch, metrics))
    return rows


def _row(stretch: Sequence[_Key], metrics: dict[str, Estimate]) -> StepSummary:
    (first, version), (last, _) = stretch[0], stretch[-1]
    return StepSummary(
        step=first,
        last_step=None if last == first else last,
        weight_version=version if all(other == version for _, other in stretch) else None,
        metrics=metrics,
    )


def _order(key: _Key) -> tuple[int, int, str]:
    step, version = key
    is_number = version is not None and version.isdecimal() and len(version) <= _MOST_DIGITS
    return (-1 if step is None else step, int(version or 0) if is_number else 0, version or "")
