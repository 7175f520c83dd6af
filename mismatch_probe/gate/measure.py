"""Checks are measured on the evidence of a run, once the run is known to be sound."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import Sample, pair_text
from mismatch_probe.difference.versus import EVERYTHING, TracedEstimate, part_of, tokens_of, traced_metrics
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.gate.claims import Claim, absolute, regression
from mismatch_probe.gate.config import Check, Slice
from mismatch_probe.notation import write_many
from mismatch_probe.records.kinds import go_on
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
        what = f"{', '.join(unfinished_stages)} not done" if unfinished_stages else "it has no stage"
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
