"""Checks met with evidence: each limit becomes one measurement for every pair of dtypes it speaks of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import pair_text
from mismatch_probe.difference.versus import EVERYTHING, Traced, part_of, tokens_of, traced_metrics
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.gate.claims import Claim, absolute, regression
from mismatch_probe.gate.config import Check, Slice
from mismatch_probe.stats.left_out import MOST_LEFT_OUT_OF_A_PASS, Gaps
from mismatch_probe.stats.metrics import TOO_LARGE
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair

Comparison = Literal["paired", "two-sample"]

_Part = tuple[PairName, bool, str, float | None]
"""Of a pair, of its baseline or not: a slice, clipped or not."""
_Metrics = tuple[dict[str, Estimate], dict[str, str]]


@dataclass(frozen=True)
class Evidence:
    """One pair of dtypes of the run, and the baseline's with prompts numbered alike.

    num_sampled: responses sampled, empty ones included; it says which look this is. gaps: of logs that lack log-probs,
    of the run's and of the baseline's.
    """

    pair: TokenPair
    num_sampled: int
    baseline: TokenPair | None = None
    comparison: Comparison | None = None
    gaps: tuple[Gaps, ...] = ()

    def left_out(self, part: Slice) -> float:
        """Share of a part's tokens, or of their surprisal where that is more, without a log-prob; of the run or of the
        baseline, whichever is more.
        """
        return max(
            (gaps.share_of(tokens_of(gaps.sequences, part.position, part.length, part.step)) for gaps in self.gaps),
            default=0.0,
        )


@dataclass(frozen=True)
class Measurement:
    """A check on one pair: the metric in the run and in the baseline, and the claim the limit is put on."""

    check: Check
    pair: str
    run: Estimate
    claim: Claim
    baseline: Estimate | None = None
    comparison: Comparison | None = None
    left_out: float = 0.0

    @property
    def num_prompts(self) -> int:
        """Prompts that the run's metric rests on."""
        assert self.run.num_prompts is not None, "an estimate made now counts its prompts"
        return self.run.num_prompts

    @property
    def can_pass(self) -> bool:
        """Whether what is left out cannot hide a deviation that the gate would see."""
        return self.left_out <= MOST_LEFT_OUT_OF_A_PASS

    @property
    def is_statistical(self) -> bool:
        """Extremes and exact checks are compared as they are."""
        return self.check.is_statistical and isinstance(self.run, Traced)


@dataclass(frozen=True)
class Measurer:
    """Measures checks: of each part of the evidence the metrics that a limit is put on, once."""

    evidence: Mapping[PairName, Evidence]
    _parts: dict[_Part, TokenPair] = field(default_factory=dict)
    _known: dict[tuple[_Part, str], _Metrics] = field(default_factory=dict)

    def measure(self, check: Check) -> Iterator[Measurement]:
        """The check on each pair it speaks of.

        Raises:
            UsageError: the run has no such pair, slice or metric, or a regression of 0.
            BrokenRecord: the metric is beyond a float64.
        """
        for name in self._pairs(check):
            evidence = self.evidence[name]
            run = self._metric(check, name, evidence.pair, of_baseline=False)
            if check.kind != "max_regression":
                yield Measurement(check, pair_text(name), run, absolute(run), left_out=evidence.left_out(check.slice))
                continue
            assert evidence.baseline is not None, "a gate file with max_regression is opened with its baseline"
            baseline = self._metric(check, name, evidence.baseline, of_baseline=True)
            claim = regression(baseline, run, higher_is_better=check.higher_is_better)
            if claim is None:
                raise UsageError(
                    f"the check {check} has no answer for {pair_text(name)}: {check.name} is {baseline.value:g} in the "
                    f"baseline and {run.value:g} in the run, and a share of 0 says nothing; use max or min"
                )
            comparison, left_out = evidence.comparison, evidence.left_out(check.slice)
            yield Measurement(check, pair_text(name), run, claim, baseline, comparison, left_out)

    def _pairs(self, check: Check) -> list[PairName]:
        wanted = check.slice.pair
        if wanted is None:
            return list(self.evidence)
        if wanted not in self.evidence:
            there = ", ".join(pair_text(name) for name in self.evidence)
            raise UsageError(
                f"the check {check} asks for the pair {pair_text(wanted)}, and the run has {there}; "
                "change slice.pair, or compare with that dtype too"
            )
        return [wanted]

    def _metric(self, check: Check, name: PairName, pair: TokenPair, *, of_baseline: bool) -> Estimate:
        part = (name, of_baseline, str(check.slice), check.clip)
        where = f"{pair_text(name)} of the {'baseline' if of_baseline else 'run'}"
        if part not in self._parts:
            self._parts[part] = _part(check.slice, check.clip, pair, where)
        if (part, check.name) not in self._known:
            self._known[part, check.name] = traced_metrics(self._parts[part], names=[check.name])
        estimates, unavailable = self._known[part, check.name]
        if check.name in estimates:
            return estimates[check.name]
        reason = unavailable[check.name]
        kind = BrokenRecord if reason == TOO_LARGE else UsageError
        raise kind(f"{check.name} cannot be had for {where}: {reason}; mend the run, or take the check out")


def _part(asked: Slice, clip: float | None, pair: TokenPair, where: str) -> TokenPair:
    part = part_of(pair, position=asked.position, length=asked.length, step=asked.step, clip=clip)
    if part is None and asked.step != EVERYTHING:
        raise UsageError(f"no token of {where} lies in the slice [{asked}]: {_steps(pair)}; change the slice")
    if part is None:
        raise UsageError(
            f"no token of {where} lies in the slice [{asked}]: its longest response has {pair.sequences.lengths.max()} "
            "tokens; change the slice, or raise --max-new-tokens"
        )
    return part


def _steps(pair: TokenPair) -> str:
    steps = pair.sequences.steps
    if steps is None:
        return "its responses are of no step"
    return f"its responses are of the steps {steps.min()} to {steps.max()}"
