"""One metric against another: how many times smaller, with an interval."""

import math

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Sequences


def contrast(first: Estimate, second: Estimate) -> Estimate | None:
    """Ratio first / second of two positive estimates from independent samples; None where either is not positive.

    The interval recovers each log estimate's variance from its own bounds (MOVER): it stays as lopsided as they are
    [Zou and Donner 2008, Statistics in Medicine 27:1693; Donner and Zou 2012, Stat. Methods Med. Res. 21:347]. Samples
    that share prompts are positively related, which makes it cautious.

    Raises:
        ValueError: the intervals have different levels.
    """
    if first.level != second.level:
        raise ValueError(f"intervals of levels {first.level} and {second.level} cannot be set against each other")
    if first.value <= 0 or second.value <= 0:
        return None
    low, high = None, None
    bounds = (first.low, first.high, second.low, second.high)
    if all(bound is not None and bound > 0 for bound in bounds):
        first_low, first_high, second_low, second_high = (math.log(bound) for bound in bounds if bound is not None)
        log_first, log_second = math.log(first.value), math.log(second.value)
        center = log_first - log_second
        low = math.exp(center - math.hypot(log_first - first_low, second_high - log_second))
        high = math.exp(center + math.hypot(first_high - log_first, log_second - second_low))
    return Estimate(
        value=first.value / second.value,
        low=low,
        high=high,
        level=first.level,
        num_sequences=first.num_sequences + second.num_sequences,
        num_tokens=first.num_tokens + second.num_tokens,
        by=first.by,
        num_prompts=fewer_prompts(first, second),
    )


def paired_contrast(sequences: Sequences, first: Floats, second: Floats, level: float) -> Estimate | None:
    """Ratio of the means of two positive values of the same tokens [T]; None where either mean is not positive.

    Each prompt is left out of both at once (jackknife), so what makes both large together widens nothing.
    """
    if not (first.sum() > 0 and second.sum() > 0):
        return None
    estimator = Estimator(sequences, level)
    totals = [estimator.totals(values, "token") for values in (first, second)]
    return estimator.smooth(ratio, totals, "token", Scale.RATIO)


def fewer_prompts(first: Estimate, second: Estimate) -> int | None:
    """Prompts of the sample that has fewer; None where one does not say."""
    if first.num_prompts is None or second.num_prompts is None:
        return None
    return min(first.num_prompts, second.num_prompts)
