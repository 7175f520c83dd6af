"""Accuracies and their differences, every interval clustered by problem.

Rewards r of responses x of mu estimate accuracy under pi by E_pi[r] = E_mu[w r] with w = pi(x)/mu(x), normalised by the
weights' own sum [Owen 2013, Monte Carlo theory, methods and examples, section 9.2]. Both accuracies come from the same
responses, so what is common to them cancels in their difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mismatch_probe.notation import write_percent
from mismatch_probe.stats.effective_share import relative_excess
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, interval, jackknife, ratio, share_interval
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats, Ints, Sequences

ENOUGH_ESS: Final = 0.5
"""Least effective share of the responses to tell accuracy under pi from."""


@dataclass(frozen=True)
class Answers:
    """Responses: what each earned [N], its tokens [N], and the number of the problem it answers [N]."""

    rewards: Floats
    lengths: Ints
    problems: Ints

    def at(self, rows: Ints) -> "Answers":
        """Some of the responses, by row."""
        return Answers(self.rewards[rows], self.lengths[rows], self.problems[rows])

    def estimator(self, level: float) -> Estimator:
        return Estimator(Sequences.of_lengths(self.lengths, self.problems), level)


@dataclass(frozen=True)
class Reweighted:
    """What responses of mu say about pi; `undecided` says why not where they do not."""

    ess: Estimate | None
    under_pi: Estimate | None
    gap: Estimate | None
    undecided: str | None


def accuracy(answers: Answers, level: float) -> Estimate:
    """Mean reward; of rewards that are all 0 or 1 the share, whose interval stays within them."""
    estimator = answers.estimator(level)
    if _is_binary(answers.rewards):
        return estimator.share(answers.rewards > 0, "sequence")
    estimate = estimator.mean(answers.rewards, "sequence")
    assert estimate is not None, "rewards are finite"
    return estimate


def reweighted(answers: Answers, log_ratio: Floats, level: float) -> Reweighted:
    """Accuracy under pi from responses of mu, and how it differs; log_ratio: sum of log pi - log mu of each [N], nats.

    The gap has no interval where all responses earned the same: they cannot show one.
    """
    estimator = answers.estimator(level)
    excess = relative_excess(log_ratio)
    ess = estimator.effective_share(log_ratio, "sequence")
    if ess is None or ess.value < ENOUGH_ESS:
        left = "nothing" if ess is None else write_percent(ess.value)
        return Reweighted(
            ess, None, None, f"weights pi/mu leave {left} of the responses, fewer than {write_percent(ENOUGH_ESS)}"
        )
    weights, rewards = 1 + excess, answers.rewards
    weighted, total = estimator.totals(weights * rewards, "sequence"), estimator.totals(weights, "sequence")
    plain, count = estimator.totals(rewards, "sequence"), estimator.counts("sequence")
    under_pi = jackknife(ratio, np.stack([weighted, total]), count)
    assert under_pi is not None, "weights are positive"
    if _is_binary(rewards):
        effective = max(1, round(ess.value * rewards.size))
        estimate = estimator.present(share_interval(under_pi, effective, level), "sequence")
    else:
        estimate = estimator.present(interval(under_pi, Scale.SIGNED, level), "sequence")
    if np.ptp(rewards) == 0:
        return Reweighted(ess, estimate, estimator.bare(0.0, "sequence"), None)
    gap = estimator.smooth(_difference_of_ratios, [weighted, total, plain, count], "sequence")
    return Reweighted(ess, estimate, gap, None)


def accuracy_difference(first: Answers, second: Answers, level: float) -> Estimate:
    """Accuracy of the first less that of the second, which answer the same problems, in pairs by problem.

    Raises:
        ValueError: they answer different problems.
    """
    if set(first.problems) != set(second.problems):
        raise ValueError("the two sets of responses answer different problems, which cannot be set against each other")
    columns: list[Floats] = []
    for answers in (first, second):
        estimator = answers.estimator(level)
        columns += [estimator.totals(answers.rewards, "sequence"), estimator.counts("sequence")]
    both = _joined([first, second]).estimator(level)
    if np.ptp(np.concatenate([first.rewards, second.rewards])) == 0:
        return both.bare(0.0, "sequence")
    estimate = both.smooth(_difference_of_ratios, columns, "sequence")
    assert estimate is not None, "every problem has responses"
    return estimate


def _difference_of_ratios(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return a / b - c / d


def _joined(parts: Sequence[Answers]) -> Answers:
    return Answers(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("rewards", "lengths", "problems"))
    )


def _is_binary(rewards: Floats) -> bool:
    return bool(np.isin(rewards, (0.0, 1.0)).all())
