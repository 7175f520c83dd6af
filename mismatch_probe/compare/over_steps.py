"""How a pair's numbers go over the steps of training, each step and weight version apart."""

from typing import Final

import numpy as np

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.records.summary import StepSummary
from mismatch_probe.stats.metrics import pair_metrics

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


def over_steps(data: PairData, level: float) -> list[StepSummary]:
    """Of each step and weight version, in their order; none where the responses are of one, or their steps not known.

    The responses of one step were sampled by several weight versions where generation runs ahead of training: what
    grows with the versions in between is staleness, and what a step's newest version shows is not.
    """
    if data.pair is None or "step" not in data.rollouts.column_names:
        return []
    steps, versions = (data.rollouts[name].take(data.rows).to_pylist() for name in ("step", "weight_version"))
    keys = list(zip(steps, versions, strict=True))
    ordered = sorted(set(keys), key=_order)
    if len(ordered) < 2:
        return []
    number = {key: place for place, key in enumerate(ordered)}
    places = np.asarray([number[key] for key in keys])
    means = []
    for (step, version), place in number.items():
        part = data.pair.of_tokens(data.pair.sequences.spread(places == place))
        assert part is not None
        metrics, _ = pair_metrics(part, level=level)
        shown = {name: estimate for name, estimate in metrics.items() if name in STEP_METRICS}
        means.append(StepSummary(step=step, weight_version=version, metrics=shown))
    return means


def _order(key: tuple[int | None, str | None]) -> tuple[int, int, str]:
    step, version = key
    is_number = version is not None and version.isdecimal() and len(version) <= _MOST_DIGITS
    return (-1 if step is None else step, int(version or 0) if is_number else 0, version or "")
