"""The rewards of a step's responses, as sums that ranks add up, and the metrics that follow from them."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from mismatch_probe.stats.sequences import Floats, Ints, Mask
from mismatch_probe.stats.totals import AddableTotals


@dataclass(frozen=True)
class RewardTotals(AddableTotals):
    """Of the rewards that are numbers, and of their sums over the responses to each prompt, which one part holds.

    Every metric of rewards follows from these alone.
    """

    counts = ("responses", "nonfinite", "groups", "flat_groups", "nonzero")
    signed_sums = ("rewards", "products", "logs")

    responses: float = 0.0
    nonfinite: float = 0.0
    rewards: float = 0.0
    squares: float = 0.0
    highest: float = -math.inf
    lowest: float = math.inf
    highest_whole: float = -math.inf
    """`highest_whole` and `lowest_whole`: rewards of the responses that were not cut."""
    lowest_whole: float = math.inf
    groups: float = 0.0
    """Prompts."""
    flat_groups: float = 0.0
    """Those whose rewards are all equal."""
    of_prompts: float = 0.0
    """Squares of a prompt's sum of rewards."""
    sizes: float = 0.0
    """Squares of a prompt's number of responses."""
    products: float = 0.0
    """A prompt's sum times its number of responses."""
    logs: float = 0.0
    """Logarithms of the sizes of the `nonzero` rewards that are not 0."""
    nonzero: float = 0.0

    @classmethod
    def of(cls, rewards: Floats, prompts: Ints | None, is_cut: Mask | None) -> Self:
        """Of the rewards of responses [N], which may be NaN, the number of each one's prompt, from 0 [N], and whether
        each was cut at the length limit [N]; None where that is not known.
        """
        if not rewards.size:
            return cls()
        of_whole_responses = rewards[np.isfinite(rewards) if is_cut is None else np.isfinite(rewards) & ~is_cut]
        numbers = rewards[np.isfinite(rewards)]
        finite_rewards = np.where(np.isfinite(rewards), rewards, 0.0)
        nonzero = np.abs(numbers[numbers != 0])
        of_group = np.arange(len(rewards)) if prompts is None else prompts
        sums = np.bincount(of_group, weights=finite_rewards)
        sizes = np.bincount(of_group, weights=np.isfinite(rewards))
        first = rewards[np.unique(of_group, return_index=True)[1]]
        is_flat = np.bincount(of_group, weights=rewards != first[of_group]) == 0
        with np.errstate(over="ignore"):
            return cls(
                responses=float(len(rewards)),
                nonfinite=float(len(rewards) - len(numbers)),
                rewards=float(numbers.sum()),
                squares=float(numbers @ numbers),
                highest=float(numbers.max(initial=-math.inf)),
                lowest=float(numbers.min(initial=math.inf)),
                highest_whole=float(of_whole_responses.max(initial=-math.inf)),
                lowest_whole=float(of_whole_responses.min(initial=math.inf)),
                groups=float(len(sizes)) if prompts is not None else 0.0,
                flat_groups=float(is_flat.sum()) if prompts is not None else 0.0,
                of_prompts=float(sums @ sums),
                sizes=float(sizes @ sizes),
                products=float(sums @ sizes),
                logs=float(np.log(nonzero).sum()),
                nonzero=float(len(nonzero)),
            )

    def metrics(self) -> dict[str, float]:
        """Nothing without rewards; the shares and errors of groups only where prompts are known."""
        if not self.responses:
            return {}
        metrics = {
            "reward/mean": self._mean,
            "reward/largest": max(self.highest, -self.lowest, 0.0),
            "reward/typical": math.exp(self.logs / self.nonzero) if self.nonzero else 0.0,
            "reward/std": self._std,
            "reward/nonfinite": self.nonfinite,
            "reward/whole_range": max(0.0, self.highest_whole - self.lowest_whole),
        }
        if self.groups:
            metrics |= {
                "reward/mean_error": self._mean_error,
                "reward/flat_groups_share": self.flat_groups / self.groups,
            }
        return metrics

    @property
    def _num_judged(self) -> float:
        """Responses whose reward is a number."""
        return self.responses - self.nonfinite

    @property
    def _mean(self) -> float:
        return self.rewards / self._num_judged if self._num_judged else math.nan

    @property
    def _std(self) -> float:
        if not self._num_judged or self.highest == self.lowest:
            return 0.0 if self._num_judged else math.nan
        return float(np.sqrt(np.maximum(self.squares / self._num_judged - self._mean * self._mean, 0)))

    @property
    def _mean_error(self) -> float:
        """Standard error of the mean, where the responses to one prompt may be alike and prompts are independent draws:
        sqrt(C / (C - 1) sum over prompts of their squared sums of residuals) / N. NaN with fewer than two prompts.
        """
        if not self._num_judged or self.groups < 2:
            return math.nan
        if self.highest == self.lowest:
            return 0.0
        mean = self._mean
        residual = self.of_prompts - 2 * mean * self.products + mean * mean * self.sizes
        return float(np.sqrt(self.groups / (self.groups - 1) * np.maximum(residual, 0)) / self._num_judged)
