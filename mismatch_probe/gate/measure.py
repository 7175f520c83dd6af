"""Checks are measured on the evidence of a run, once the run is known to be sound; and each has its sentence."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import Sample, pair_text
from mismatch_probe.difference.versus import EVERYTHING, TracedEstimate, part_of, tokens_of, traced_metrics
from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.gate.claims import Bounds, Claim, absolute, regression
from mismatch_probe.gate.config import Check, Slice
from mismatch_probe.notation import (
    bounds_nothing,
    round_outwards,
    write_bounds,
    write_change,
    write_many,
    write_value,
)
from mismatch_probe.records.answers import CheckAnswer, Look
from mismatch_probe.records.files import go_on
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.stats.metrics import TOO_LARGE
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS, Gaps
from mismatch_probe.verdict.case import copy_of, where_equal

ComparisonKind = Literal["paired", "two-sample"]

_PartKey = tuple[PairName, bool, str, float | None]
"""A part of the evidence: the pair, whether it is the baseline's, the slice, and the clip."""
_Metrics = tuple[dict[str, Estimate], dict[str, str]]


@dataclass(frozen=True)
class Evidence:
    """One pair of dtypes of the run, and the baseline's pair with prompts numbered alike."""

    pair: TokenPair
    num_sampled: int
    """Responses that were sampled, empty ones included; it says which look this is."""
    baseline: TokenPair | None = None
    comparison: ComparisonKind | None = None
    gaps: tuple[Gaps, ...] = ()
    """The gaps of the run's log and of the baseline's, where these lack log-probs."""

    def left_out(self, part: Slice) -> float:
        """The share of a part's tokens without a log-prob, or of their surprisal where that share is larger.

        It is the larger share of the run and the baseline.
        """
        return max(
            (gaps.share_of(tokens_of(gaps.sequences, part.position, part.length, part.step)) for gaps in self.gaps),
            default=0.0,
        )


@dataclass(frozen=True)
class CheckMeasurement:
    """A check on one pair: the metric in the run and in the baseline, and the claim that the limit bounds."""

    check: Check
    pair: str
    run: Estimate
    claim: Claim
    baseline: Estimate | None = None
    comparison: ComparisonKind | None = None
    left_out: float = 0.0

    @property
    def num_prompts(self) -> int:
        """The number of prompts that the run's metric is estimated from."""
        assert self.run.num_prompts is not None, "an estimate made now counts its prompts"
        return self.run.num_prompts

    @property
    def can_pass(self) -> bool:
        """Whether the tokens that are left out are too few to hide a deviation that the gate would see."""
        return self.left_out <= MOST_LEFT_OUT_OF_A_PASS

    @property
    def is_statistical(self) -> bool:
        """Whether the check is decided by an interval; extremes and exact checks are compared directly."""
        return self.check.is_statistical and isinstance(self.run, TracedEstimate)


@dataclass(frozen=True)
class Measurer:
    """Measures checks; it computes each metric of each part of the evidence once."""

    evidence: Mapping[PairName, Evidence]
    _parts: dict[_PartKey, TokenPair] = field(default_factory=dict)
    _metrics: dict[tuple[_PartKey, str], _Metrics] = field(default_factory=dict)

    def measure(self, check: Check) -> Iterator[CheckMeasurement]:
        """Measure the check on each pair that it names.

        Raises:
            UsageError: the run has no such pair, slice or metric, or a regression of 0.
            BrokenRecord: the metric is beyond a float64.
        """
        for name in self._pair_names(check):
            evidence = self.evidence[name]
            run = self._metric_of(check, name, evidence.pair, of_baseline=False)
            if check.kind != "max_regression":
                yield CheckMeasurement(
                    check, pair_text(name), run, absolute(run), left_out=evidence.left_out(check.slice)
                )
                continue
            assert evidence.baseline is not None, "a gate file with max_regression is opened with its baseline"
            baseline = self._metric_of(check, name, evidence.baseline, of_baseline=True)
            claim = regression(baseline, run, higher_is_better=check.higher_is_better)
            if claim is None:
                raise UsageError(
                    f"the check {check} has no answer for {pair_text(name)}: {check.name} is {baseline.value:g} in the "
                    f"baseline and {run.value:g} in the run, and a share of 0 says nothing; use max or min"
                )
            comparison, left_out = evidence.comparison, evidence.left_out(check.slice)
            yield CheckMeasurement(check, pair_text(name), run, claim, baseline, comparison, left_out)

    def _pair_names(self, check: Check) -> list[PairName]:
        requested_pair = check.slice.pair
        if requested_pair is None:
            return list(self.evidence)
        if requested_pair not in self.evidence:
            pairs = ", ".join(pair_text(name) for name in self.evidence)
            raise UsageError(
                f"the check {check} asks for the pair {pair_text(requested_pair)}, and the run has {pairs}; "
                "change slice.pair, or compare with that dtype too"
            )
        return [requested_pair]

    def _metric_of(self, check: Check, name: PairName, pair: TokenPair, *, of_baseline: bool) -> Estimate:
        part = (name, of_baseline, str(check.slice), check.clip)
        where = f"{pair_text(name)} of the {'baseline' if of_baseline else 'run'}"
        if part not in self._parts:
            self._parts[part] = _tokens_of_slice(check.slice, check.clip, pair, where)
        if (part, check.name) not in self._metrics:
            self._metrics[part, check.name] = traced_metrics(self._parts[part], names=[check.name])
        estimates, unavailable = self._metrics[part, check.name]
        if check.name in estimates:
            return estimates[check.name]
        reason = unavailable[check.name]
        kind = BrokenRecord if reason == TOO_LARGE else UsageError
        raise kind(f"{check.name} cannot be had for {where}: {reason}; fix the run, or take the check out")


def _tokens_of_slice(part_slice: Slice, clip: float | None, pair: TokenPair, where: str) -> TokenPair:
    part = part_of(pair, position=part_slice.position, length=part_slice.length, step=part_slice.step, clip=clip)
    if part is None and part_slice.step != EVERYTHING:
        raise UsageError(
            f"no token of {where} lies in the slice [{part_slice}]: {_steps_of_pair_text(pair)}; change the slice"
        )
    if part is None:
        raise UsageError(
            f"no token of {where} lies in the slice [{part_slice}]: its longest response has "
            f"{pair.sequences.lengths.max()} tokens; change the slice, or raise --max-new-tokens"
        )
    return part


def _steps_of_pair_text(pair: TokenPair) -> str:
    steps = pair.sequences.steps
    if steps is None:
        return "its responses are of no step"
    return f"its responses are of the steps {steps.min()} to {steps.max()}"


def check_finished(manifest: Manifest, path: Path, where: str) -> None:
    """Require that every stage of the run at `path` is done; sentences call the run `where`.

    Raises:
        BrokenRecord: a stage is not done.
    """
    unfinished_stages = [name for name, stage in manifest.stages.items() if stage.state not in ("done", "skipped")]
    if unfinished_stages or not manifest.stages:
        count = f"{len(unfinished_stages)} of its {len(manifest.stages)} stages are not done"
        what = f"{count}, {unfinished_stages[0]} the first of them" if unfinished_stages else "it has no stage"
        raise BrokenRecord(f"{where} is unfinished ({what}): {go_on(path)}")


def check_complete(samples: Iterable[Sample], num_expected: int, path: Path, where: str) -> None:
    """Require every response that the run was to sample, so that none was left out because of what it shows.

    Raises:
        BrokenRecord: responses are missing.
    """
    for sample in samples:
        if sample.num_sampled not in (0, num_expected):
            raise BrokenRecord(
                f"{pair_text(sample.name)} of {where} has {sample.num_sampled} responses, and {num_expected} were "
                f"asked for: nothing is judged; {go_on(path)}, or make it again"
            )


def sound_pair(sample: Sample, manifest: Manifest, where: str) -> TokenPair:
    """The token pair of a sample, once it is sure that the sample may be judged.

    Raises:
        BrokenRecord: a dtype was not applied; token ids differ; log-probs are missing or not finite (in a log: those of
            most tokens); there is no response to compare; or a fault of the log makes its numbers meaningless.
    """
    pi, mu = manifest.settings.pi(sample.name[0]), manifest.settings.mu(sample.name[1])
    name = f"{pair_text(sample.name)} of {where}"
    _require_applied_dtype(manifest, pi.stage("score"), pi.dtype, f"the training path for {name}")
    _require_applied_dtype(manifest, mu.stage("sample"), mu.dtype, f"the engine for {name}")
    counts = sample.data.counts
    in_part = counts.is_measured_in_part
    num_dropped = 0 if in_part else sample.num_sampled - sample.num_empty - counts.num_sequences
    foreign, void = write_many(counts.mismatched_ids, "response"), write_many(num_dropped, "response")
    faults = (
        (sample.num_sampled == 0, "holds no response at all"),
        (counts.mismatched_ids, f"has {foreign} scored on other token ids than were sampled"),
        (
            not in_part and counts.missing_mu,
            f"lacks {_count_log_probs(counts.missing_mu)} of the engine (NaN, or -100 or lower)",
        ),
        (
            not in_part and counts.missing_pi,
            f"lacks {_count_log_probs(counts.missing_pi)} of the training path (NaN, or -9999)",
        ),
        (counts.nonfinite_mu, f"has {write_many(counts.nonfinite_mu, 'infinite log-prob')} of the engine"),
        (counts.nonfinite_pi, f"has {write_many(counts.nonfinite_pi, 'infinite log-prob')} of the training path"),
        (counts.positive_mu, f"has {_count_log_probs(counts.positive_mu)} of the engine above 0, and none can be"),
        (
            counts.positive_pi,
            f"has {_count_log_probs(counts.positive_pi)} of the training path above 0, and none can be",
        ),
        (num_dropped, f"has {void} whose prefill or reference log-probs are missing, not finite or above 0"),
    )
    advice = "find the cause and run compare again" if manifest.log is None else "fix the log and import it again"
    for count, what in faults:
        if count:
            raise BrokenRecord(f"{name} {what}: nothing is judged; {advice}")
    if pi.logged and mu.logged and (broken_note := _broken_log_note(manifest)):
        raise BrokenRecord(f"{name}: {broken_note}: nothing is judged; {advice}")
    if sample.data.pair is None:
        raise BrokenRecord(
            f"{name} has not one response token to compare: nothing is judged; look at the prompts, the chat template "
            "and --max-new-tokens"
        )
    copies = copy_of(sample.data.pair, (pi.dtype, mu.dtype), are_identified=sample.data.legs_are_identified)
    if copies is not None:
        raise BrokenRecord(
            f"{name} has the same log-probs on both sides, bit for bit {where_equal(copies)}, and no leg says which "
            "side computed it, so that one may be a copy: nothing is judged; run compare again with this version"
        )
    return sample.data.pair


def _broken_log_note(manifest: Manifest) -> str | None:
    notes = [] if manifest.log is None else manifest.log.notes
    return next((note.sentence for note in notes if note.level == "broken"), None)


def _require_applied_dtype(manifest: Manifest, stage: str, dtype: Dtype, side: str) -> None:
    record = manifest.stages.get(stage)
    applied_dtype = None if record is None else record.effective_settings.get("dtype")
    if applied_dtype != dtype:
        raise BrokenRecord(
            f"{side} ran in {applied_dtype or 'an unknown dtype'}, not in {dtype}: nothing is judged; "
            "find what overrides the dtype (quantisation, the checkpoint's own config)"
        )


def _count_log_probs(number: int) -> str:
    return write_many(number, "log-prob")


MOST_TIMES: Final = 2**10


@dataclass(frozen=True)
class OpenTail:
    """A limit that cannot be passed because of values that are too rare for the sample to show."""

    tokens: int | None
    """About so many tokens like these would pass; None where a thousand times as many would not."""


def open_tail(claim: Claim, check: Check, num_tokens: int, alpha: float) -> OpenTail | None:
    """The open tail that alone prevents a pass; None where something else does, or nothing."""
    if not claim.is_held_back_by_tail(check.limit, alpha, upper=check.upper):
        return None
    times = 2
    while times <= MOST_TIMES:
        if claim.within(check.limit, alpha, upper=check.upper, times=times):
            return OpenTail(round_number(times * num_tokens))
        times *= 2
    return OpenTail(None)


def round_number(number: int) -> int:
    return int(float(f"{number:.1e}"))


@dataclass(frozen=True)
class Prompts:
    """The number of prompts of a check, and the fewest that a pass needs."""

    number: int
    least: int

    @property
    def are_enough(self) -> bool:
        return self.number >= self.least

    def __str__(self) -> str:
        is_one = self.number == 1
        return f"{self.number} prompt{'' if is_one else 's'} {'is' if is_one else 'are'} fewer than the {self.least}"


def check_sentence(
    measurement: CheckMeasurement, answer: CheckAnswer, waits_for: str, bounds: Bounds, passing: float | None
) -> str:
    """The measured value, its interval, the answer, what it waits for, and the limit that would pass."""
    value = f"{_measured_sentence(measurement)}{_range_text(measurement, *bounds)}"
    limit = measurement.check.bound
    judgement = {"pass": f"{limit} is kept", "fail": f"{limit} is broken"}.get(
        answer, f"{limit} is neither kept nor broken for sure: {waits_for}"
    )
    return f"{value}; {judgement}{_passing_limit_advice(measurement, passing)}"


def _pair_label(pair: str) -> str:
    """`bf16/bf16` as the report calls it."""
    return sides_label(*pair.split("/"))


def _measured_sentence(measurement: CheckMeasurement) -> str:
    check = measurement.check
    what = f"{check.words} of {_pair_label(measurement.pair)}"
    if measurement.baseline is None:
        return f"{what} is {write_value(measurement.run)}"
    baseline = f"the baseline's {write_value(measurement.baseline)}"
    return f"{what} is {write_value(measurement.run)}, {write_change(measurement.claim.value)} than {baseline}"


def _range_text(measurement: CheckMeasurement, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    if measurement.baseline is not None:
        return f" (from {write_change(low)} to {write_change(high)})"
    return f" (from {write_bounds(replace(measurement.run, low=low, high=high), measurement.check.limit)})"


def reason_to_wait(measurement: CheckMeasurement, open_tail: OpenTail | None, look: Look, prompts: Prompts) -> str:
    """What an undecided check waits for: the same words for every check that waits for the same thing."""
    if not look.number:
        return f"the first look takes {write_many(look.declared[0], 'sequence')}, and there are {look.num_sequences}"
    if not prompts.are_enough:
        return f"{prompts} that a pass needs"
    if not measurement.can_pass:
        left_out, most = (f"{100 * share:.3g} %" for share in (measurement.left_out, MOST_LEFT_OUT_OF_A_PASS))
        return (
            f"tokens without a log-prob are {left_out} of its part (by number, or by surprisal, where one that both "
            f"sides lack counts as the rarest), and a pass tolerates {most}"
        )
    if open_tail is not None:
        return _too_rare_to_judge(measurement, open_tail)
    return f"{write_many(measurement.run.num_sequences, 'sequence')} do not decide it"


def _too_rare_to_judge(measurement: CheckMeasurement, open_tail: OpenTail) -> str:
    decides = [] if open_tail.tokens is None else [f"about {open_tail.tokens:,} tokens decide"]
    if measurement.check.clip is not None:
        decides.append(f"a clip below {measurement.check.clip:g} may")
    decided_by = ", ".join(decides) or "no sample of a size that is near decides"
    return f"values too rare for this sample may break it ({decided_by})"


def _passing_limit_advice(measurement: CheckMeasurement, passing: float | None) -> str:
    if passing is None or (measurement.baseline is not None and passing <= 0):
        return ""
    if measurement.baseline is None and bounds_nothing(passing, measurement.claim.value, measurement.check.limit):
        return ""
    tightest = round_outwards(passing, is_up=measurement.check.upper)
    which = "smallest" if measurement.check.upper else "largest"
    return f"; the {which} {measurement.check.kind} that would pass is {tightest:g}"
