"""Whether the KL of a token grows over the steps of a log, by tests that a flat noisy log does not pass.

Three things are asked, since each alone is fooled. Ranks of responses (Kendall's tau-b [Kendall 1945, Biometrika
33:239]) are moved by no single token, but by steps that scatter more than their responses do. Ranks of steps take that
scatter in, but say nothing of few steps; there a leap is asked for that is far beyond the scatter before it. The
interval of the ratio says how large it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from mismatch_probe.stats.estimator import Estimator, contrast
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.metrics import k3_terms, pair_metrics
from mismatch_probe.stats.results import Estimate, StepGrowth
from mismatch_probe.stats.sequences import Floats, Ints, Mask, Sequences, TokenPair
from mismatch_probe.stats.tails import LOG_BOUND

LEAST_RATIO: Final = 2.0
"""The lower bound of last over first: less is not worth a headline."""
RESPONSES_BY_CHANCE: Final = 1e-3
STEPS_BY_CHANCE: Final = 0.05
"""One-sided p-values of the rank correlations of responses, and of steps, with the step."""
LEAP: Final = 3.0
BLIND_LEAP: Final = 10.0
"""Where the steps are too few for their ranks: each step from some step on is so many times each step before it; the
second where these are fewer than three, so that nothing says how steps scatter.
"""
_STEPS_THAT_SHOW_SCATTER: Final = 3
FLAT: Final = 3.0
"""The largest third of the steps over the smallest, in the KL of a token; of single steps it is `BLIND_LEAP`, against
the median, since a step has few responses.
"""
_PARTS: Final = 3
_STEEP_SHARE: Final = 1 / 3
"""Of the growth in logarithms: one step that makes as much is named."""
_MOST_AT_AN_END: Final = 1 / 4
"""Of the steps: so many at most are taken together at an end, until the ends have enough prompts to show a growth."""
_ENOUGH_PROMPTS: Final = 4
"""Of an end: an interval of fewer clusters holds nearly everything."""
_STEPS_FOR_EACH_AT_AN_END: Final = 16


@dataclass(frozen=True)
class ResponseSums:
    """The k3 of responses, as little of a log as its growth over the steps follows from; arrays are [N]."""

    steps: Ints
    prompts: Ints
    """What tells clusters of responses apart."""
    k3: Floats
    """Sum over the tokens, nats; none of their log-ratios above 20."""
    tokens: Ints

    @classmethod
    def of(cls, pair: TokenPair, steps: Ints) -> Self:
        terms = pair.sequences.sum_by_sequence(k3_terms(np.minimum(pair.diff, LOG_BOUND)))
        return cls(steps, pair.sequences.clusters, terms, pair.sequences.lengths)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        columns = ([getattr(part, name) for part in parts] for name in ("steps", "prompts", "k3", "tokens"))
        return cls(*map(np.concatenate, columns))

    def divergence(self, is_chosen: Mask, level: float) -> Estimate | None:
        """KL (k3) of a token of some of the responses."""
        sequences = Sequences.of_lengths(self.tokens[is_chosen], self.prompts[is_chosen])
        return Estimator(sequences, level).mean_of_sums(self.k3[is_chosen], Scale.POSITIVE)


def step_growth(pair: TokenPair, level: float) -> StepGrowth | None:
    """How the KL (k3) of a token grows over the steps of the responses; None where no growth is shown.

    Responses whose step is not known (-1) are left out.
    """
    part = _of_known_steps(pair)
    if part is None or part.sequences.steps is None:
        return None
    steps = part.sequences.steps
    growth = _growth(ResponseSums.of(part, steps), lambda is_chosen: _metric(part, is_chosen, "kl_k3", level))
    if growth is None:
        return None
    return replace(growth, last_abs_diff=_metric(part, steps >= growth.last_from, "abs_logprob_diff", level))


def growth_of_sums(sums: ResponseSums, level: float) -> StepGrowth | None:
    """`step_growth`, of what a log was summed to."""
    return _growth(sums, lambda is_chosen: sums.divergence(is_chosen, level))


def can_show_growth(steps: Ints, prompts: Ints) -> bool:
    """Whether responses of these steps and prompts [N] are enough to show a growth, were each step above those before
    it.
    """
    number = np.unique(steps, return_inverse=True)[1]
    step_of_unit = np.unique(np.stack([number, prompts]), axis=1)[0]
    _, chance = _kendall(step_of_unit, np.arange(step_of_unit.size))
    return chance <= RESPONSES_BY_CHANCE


def _growth(sums: ResponseSums, divergence: "_Divergence") -> StepGrowth | None:
    steps, number = np.unique(sums.steps, return_inverse=True)
    if len(steps) < 2:
        return None
    tau, chance = _rank_correlation(sums, number)
    values = np.bincount(number, sums.k3) / np.bincount(number, sums.tokens)
    if not (chance <= RESPONSES_BY_CHANCE and _steps_are_in_order(values)):
        return None
    ends = _ends(divergence, number, len(steps))
    if ends is None:
        return None
    first, last, ratio, size = ends
    steepest, leap = _steepest(values, None if ratio is None else ratio.value)
    return StepGrowth(
        first_step=int(steps[0]),
        first_up_to=int(steps[size - 1]),
        last_from=int(steps[-size]),
        last_step=int(steps[-1]),
        first=first,
        last=last,
        ratio=ratio,
        steepest_step=None if steepest is None else int(steps[steepest]),
        step_before=None if steepest is None else int(steps[steepest - 1]),
        steepest_ratio=leap,
        rank_correlation=tau,
        p_value=chance,
    )


_Divergence = Callable[[Mask], Estimate | None]
"""KL (k3) of a token of some of the responses [N]."""


def _of_known_steps(pair: TokenPair) -> TokenPair | None:
    steps = pair.sequences.steps
    return None if steps is None else pair.of_tokens(pair.sequences.spread(steps >= 0))


def _rank_correlation(sums: ResponseSums, number: Ints) -> tuple[float, float]:
    """Kendall's tau-b of the step and the mean of a cluster at that step, and its one-sided p-value.

    number: of the step of each response [N].
    """
    prompt = np.unique(sums.prompts, return_inverse=True)[1]
    num_prompts = int(prompt.max()) + 1
    units, unit = np.unique(number.astype(np.int64) * num_prompts + prompt, return_inverse=True)
    return _kendall(units // num_prompts, np.bincount(unit, sums.k3) / np.bincount(unit, sums.tokens))


def _kendall(steps: Ints, values: Floats) -> tuple[float, float]:
    """tau-b and the one-sided p-value that `values` rise with the steps; 0 and 1 where all values are alike."""
    from scipy.stats import kendalltau

    correlation = kendalltau(steps, values, alternative="greater")
    if not np.isfinite(correlation.pvalue):
        return 0.0, 1.0
    return float(correlation.statistic), float(correlation.pvalue)


def _steps_are_in_order(values: Floats) -> bool:
    """Whether the means of the steps rise by their ranks, or leap once beyond all that was before."""
    _, chance = _kendall(np.arange(len(values)), values)
    highest_before, lowest_after = np.maximum.accumulate(values)[:-1], np.minimum.accumulate(values[::-1])[::-1][1:]
    num_before = np.arange(1, len(values))
    leap = np.where(num_before < _STEPS_THAT_SHOW_SCATTER, BLIND_LEAP, LEAP)
    return bool(chance <= STEPS_BY_CHANCE or (lowest_after > leap * highest_before).any())


def _ends(
    divergence: _Divergence, number: Ints, num_steps: int
) -> tuple[Estimate, Estimate, Estimate | None, int] | None:
    """KL (k3) of the first and of the last steps, their ratio, and how many steps they are: the fewest that show that
    the last is larger. None where that is not shown.
    """
    growth = None
    for size in range(max(1, num_steps // _STEPS_FOR_EACH_AT_AN_END), 1 + max(1, int(_MOST_AT_AN_END * num_steps))):
        first, last = (divergence(is_chosen) for is_chosen in (number < size, number >= num_steps - size))
        if first is None or last is None:
            continue
        ratio = contrast(last, first)
        if _is_larger(first, last, ratio):
            growth = first, last, ratio, size
            if min(first.num_prompts or 0, last.num_prompts or 0) >= _ENOUGH_PROMPTS:
                break
    return growth


def _metric(pair: TokenPair, is_chosen: Mask, name: str, level: float) -> Estimate | None:
    """Of some of the responses [N]."""
    part = pair.of_tokens(pair.sequences.spread(is_chosen))
    return None if part is None else pair_metrics(part, level, (name,))[0].get(name)


def _is_larger(first: Estimate, last: Estimate, ratio: Estimate | None) -> bool:
    """From 0 on any KL whose interval leaves 0 out is."""
    if ratio is None:
        return first.value == 0 and last.low is not None and last.low > 0
    return ratio.low is not None and ratio.low >= LEAST_RATIO


def _steepest(values: Floats, ratio: float | None) -> tuple[int | None, float | None]:
    """The number of the step that makes most of the growth, and its KL over that of the step before; None where the
    growth is even.
    """
    if ratio is None or len(values) < 3 or not (values > 0).all():
        return None, None
    leaps = values[1:] / values[:-1]
    place = int(np.argmax(leaps))
    if leaps[place] < max(LEAP, ratio**_STEEP_SHARE):
        return None, None
    return place + 1, float(leaps[place])


@dataclass(frozen=True)
class StepLevels:
    """The KL (k3) of a token at each step of a log, in the order of the steps, and its tokens."""

    steps: Sequence[int]
    values: Sequence[float]
    tokens: Sequence[int]

    @property
    def mean(self) -> float:
        """Over all tokens."""
        return float(np.average(self.values, weights=self.tokens))

    @property
    def lowest(self) -> tuple[float, int]:
        """The smallest KL, and its step."""
        return min(zip(self.values, self.steps, strict=True))

    @property
    def highest(self) -> tuple[float, int]:
        return max(zip(self.values, self.steps, strict=True))

    @property
    def is_flat(self) -> bool:
        """Whether no third of the steps is `FLAT` times another, and no step stands out: 88 to 100 % of simulated logs
        that are flat, noisy and heavy-tailed. Whoever calls a log flat names its range too.
        """
        values, tokens = np.asarray(self.values, float), np.asarray(self.tokens, float)
        parts = zip(*(np.array_split(column, min(_PARTS, len(values))) for column in (values, tokens)), strict=True)
        means = [float(np.average(part, weights=weights)) for part, weights in parts]
        return max(means) <= FLAT * min(means) and float(values.max()) <= BLIND_LEAP * float(np.median(values))
