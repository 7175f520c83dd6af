"""The rewards of a step's responses, as sums that ranks add up; and whether a step repeats an earlier batch."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.guards.diagnosis import Window
from mismatch_probe.guards.rules.base import Values
from mismatch_probe.stats.sequences import Floats, Ints, Mask
from mismatch_probe.stats.totals import AddableTotals

REPEATS: Final = "response/repeats"
RETURNED: Final = "response/returned_after"
NOT_NEW: Final = "response/steps_not_new"
NEW: Final = dict.fromkeys((REPEATS, RETURNED, NOT_NEW), 0.0)
"""The metrics of a batch that was never seen."""
REMEMBERED: Final = 64
"""Batches."""

_LOG_PROB: Final = "mismatch/logprob_mu"
_RMS: Final = "mismatch/logprob_mu_rms"
_RETURN_NATS: Final = "response/return_nats"
_LENGTHS: Final = ("response/length_mean", "response/length_max")
_SAME: Final = 1e-9
"""Relative difference of two sums of the same numbers in another order."""
_UNLIKELY_NATS: Final = 12.0
"""Mean -log mu of a response: shorter answers of weights that stand still may be drawn again, in another order."""

_NEVER_NATS: Final = 14.0
"""-log of the chance, one in a million, that so many batches in a row are among those remembered."""

_MOST_NATS: Final = 100.0

Digest = tuple[float, ...]
"""The mean log-prob of mu, the lengths, and the rms, which responses that were sampled anew do not share: two means of
log-probs with two decimals are equal in one of some thousand cases, both moments in one of a billion. A version before
kept no rms.
"""


_OF_TWO_NATS: Final = 2 * math.log(2)
"""Two different responses to one prompt have no less together."""
_EVEN_NATS: Final = 0.65
"""-log of a probability that two tokens may have at once, with room for one decimal."""


def return_nats(responses: float, surprisal: float) -> float:
    """-log of the chance that responses with this surprisal [nats] are drawn again, in any order, by weights that stand
    still, where each is one of K = exp(its mean nats) that are as likely.

    All orders are counted where K is more than the responses; else the chance is that of two equal multinomial counts.
    Below `_OF_TWO_NATS` there is one order; above it no counts are likelier than a half.
    """
    if surprisal < _OF_TWO_NATS:
        return max(0.0, surprisal)
    nats = surprisal / responses
    outcomes = math.exp(min(nats, _MOST_NATS))
    if outcomes >= responses:
        return max(math.log(2), surprisal - math.lgamma(responses + 1))
    return max(math.log(2), (outcomes - 1) / 2 * math.log(4 * math.pi * responses / outcomes) - nats / 2)


@dataclass
class SeenBatches:
    digests: deque[Digest | None] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Of the last batches, the newest last; None of a step that gave none."""
    not_new: int = 0
    """Steps in a row, the last one included, whose batch was one of those before."""
    repeated_nats: float = 0.0
    """`repeated_nats` and `returned_nats`: -log of the chance that the steps in a row up to now look like the one
    before, or like some of those before, where weights stand still.
    """
    returned_nats: float = 0.0

    def take(self, metrics: Values) -> dict[str, float]:
        """Takes a step in. How many steps right before it had its very responses; how many steps ago a batch with them
        came last, 0 where none did; and `not_new`. Nothing where no log-prob of mu is recorded.

        A mean that is exactly 0, or not a number, shows nothing. Nothing is learnt from a batch in which all responses
        to each prompt earned the same, so it may come again. Likely responses count once chance does not bring so many
        steps in a row that look alike.
        """
        if _LOG_PROB not in metrics:
            self.digests.append(None)
            return {}
        digest = _digest(metrics)
        mean = list(reversed(self.digests))
        self.digests.append(digest)
        if digest is None or metrics.get("reward/flat_groups_share") == 1:
            self.not_new, self.repeated_nats, self.returned_nats = 0, 0.0, 0.0
            return dict(NEW)
        same = [_is_same(digest, other) for other in mean]
        in_a_row = same.index(False) if False in same else len(same)
        is_repeated, is_returned = self._are_no_chance(same, metrics)
        if not is_returned:
            same = [is_repeated, *[False] * (len(same) - 1)] if same else []
        in_a_row = in_a_row if is_repeated else 0
        returned_after = same.index(True) + 1 if True in same else 0
        self.not_new = self.not_new + 1 if returned_after else 0
        return {REPEATS: float(in_a_row), RETURNED: float(returned_after), NOT_NEW: float(self.not_new)}

    def _are_no_chance(self, same: Sequence[bool], metrics: Values) -> tuple[bool, bool]:
        """Whether chance makes no batch look like the one before, and like some of those before. same: whether it looks
        like each of these, the newest first.

        A batch that looks like m others brings its nats less log m: the chance that these steps look so is never more.
        """
        nats = _nats_again(metrics)
        is_unlikely = -metrics[_LOG_PROB] * metrics.get(_LENGTHS[0], 0.0) > _UNLIKELY_NATS
        self.repeated_nats = self.repeated_nats + nats if same and same[0] else 0.0
        of_others = self.returned_nats + nats - math.log(max(1, len(same)))
        self.returned_nats = max(0.0, of_others) if True in same else 0.0
        is_repeated = bool(same) and same[0] and (is_unlikely or self.repeated_nats > _NEVER_NATS)
        return is_repeated, is_unlikely or self.returned_nats > _NEVER_NATS

    def state(self) -> dict[str, Any]:
        """JSON values."""
        digests = [None if digest is None else list(digest) for digest in self.digests]
        nats = {"repeated_nats": self.repeated_nats, "returned_nats": self.returned_nats}
        return {"digests": digests, "not_new": self.not_new} | nats

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None, history: Iterable[Values]) -> Self:
        """history: the metrics of the last steps, which stand for a state of the version before, that has none.

        Raises:
            ValueError: a batch is not described as here, or the count is no whole number.
        """
        if state is None:
            return cls(deque(map(_digest, history), maxlen=REMEMBERED))
        digests = [None if digest is None else tuple(map(float, digest)) for digest in state["digests"]]
        if any(digest is not None and len(digest) not in (1 + len(_LENGTHS), 2 + len(_LENGTHS)) for digest in digests):
            raise ValueError("a batch of a state is not described by its log-probs and lengths")
        nats = [float(state.get(name, 0.0)) for name in ("repeated_nats", "returned_nats")]
        if type(state["not_new"]) is not int or not all(map(math.isfinite, nats)):
            raise ValueError("a count of steps without a new batch is no whole number, or its nats are none")
        return cls(deque(digests, maxlen=REMEMBERED), state["not_new"], *nats)


def _digest(metrics: Values) -> Digest | None:
    log_prob = metrics.get(_LOG_PROB, math.nan)
    if not math.isfinite(log_prob) or log_prob == 0:
        return None
    return (log_prob, *(metrics.get(name, 0.0) for name in _LENGTHS), metrics.get(_RMS, 0.0))


def _is_same(digest: Digest, other: Digest | None) -> bool:
    if other is None or len(other) != len(digest):
        return False
    return all(math.isclose(mine, its, rel_tol=_SAME) for mine, its in zip(digest, other, strict=True))


def _nats_again(metrics: Values) -> float:
    """-log of the chance that such a batch is drawn again; none where all its tokens are of one probability that others
    may have, too.
    """
    mean = -metrics[_LOG_PROB]
    if mean > _EVEN_NATS and math.isclose(metrics.get(_RMS, 0.0), mean, rel_tol=_SAME):
        return 0.0
    return metrics.get(_RETURN_NATS, 0.0)


REWARD: Final = "reward/mean"
_FEWEST_BEFORE: Final = 4
_FEWEST_AFTER: Final = 2
_ERRORS: Final = 4.0
"""Standard errors of the change, which noise does not reach at one of a dozen places."""
_SLIDES: Final = (4, 6, 8, 12)
"""Steps that a fall takes which is no jump."""
_BETTER: Final = 2.0
"""Of squares, in units of a step's variance. Where a step errs by a sixth of the fall, nine jumps of ten pass, and of
falls over four steps and more one of ten at the most.
"""


@dataclass(frozen=True)
class RewardJump:
    """The mean reward went from one level to another between two steps."""

    first_step: int
    """The first step of the later level."""
    level_before: float
    level_after: float


def reward_jump(window: Window) -> RewardJump | None:
    """Where the reward changed at once and is level before and after; None where it did not, or slid.

    Two levels are fitted to the steps by least squares, and two that are joined by a slope over some steps. A jump is a
    change by more than `_ERRORS` standard errors which the first describes better.
    """
    steps = [step for step in sorted(window.history) if math.isfinite(window.history[step].get(REWARD, math.nan))]
    if len(steps) < _FEWEST_BEFORE + _FEWEST_AFTER:
        return None
    means = np.array([window.history[step][REWARD] for step in steps])
    variance = _variance(means, [window.history[step].get("reward/mean_error", math.nan) for step in steps])
    numbers = np.arange(len(steps))
    places = range(_FEWEST_BEFORE, len(steps) - _FEWEST_AFTER + 1)
    rest, place = min((_rest_after(means, np.where(numbers >= place, 1.0, 0.0)), place) for place in places)
    level_before, level_after = float(means[:place].mean()), float(means[place:].mean())
    error = math.sqrt(variance * (1 / place + 1 / (len(steps) - place)))
    slide_rest = min(
        _rest_after(means, np.clip((numbers - start + 1) / slide, 0.0, 1.0))
        for slide in _SLIDES
        for start in range(1, len(steps) - 1)
    )
    if abs(level_after - level_before) <= _ERRORS * error or slide_rest - rest <= _BETTER * variance:
        return None
    return RewardJump(steps[place], level_before, level_after)


def _rest_after(means: Floats, course: Floats) -> float:
    """The sum of squares that is left of the means [S] where two levels are fitted, mixed as the course says [S]."""
    columns = np.stack([1 - course, course], axis=1)
    rest = means - columns @ np.linalg.lstsq(columns, means)[0]
    return float(rest @ rest)


def _variance(means: Floats, errors: Sequence[float]) -> float:
    """Of a step: the mean square of the errors that are known, else from the differences of steps, which a slow change
    leaves alone.
    """
    variances = [error**2 for error in errors if math.isfinite(error) and error > 0]
    if variances:
        return float(np.mean(variances))
    return float(np.mean([(next_mean - mean) ** 2 for mean, next_mean in pairwise(means.tolist())])) / 2


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
