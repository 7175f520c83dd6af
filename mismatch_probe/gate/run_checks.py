"""What a gate asks besides limits on a pair's metrics: that the KL of a log does not grow over its steps, and that the
run's own verdict is no bug. The preset `layout` asks that the first step of a training does not depend on its parallel
layout, and `bitwise` that whatever a side computed twice is equal, of models whose engine can.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.compare.run_reader import growth_over_steps
from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import Sample, pair_text
from mismatch_probe.dtypes import sides_label
from mismatch_probe.errors import BrokenRecord, ExitCode, RunDirectoryError, UsageError
from mismatch_probe.gate.claims import LAYOUT_METRICS
from mismatch_probe.gate.config import GateFile, GateSettings, GateSource, LayoutCheck
from mismatch_probe.gate.measure import Evidence
from mismatch_probe.logs.metric_files import read_metric_log
from mismatch_probe.logs.metric_names import first_step_names
from mismatch_probe.notation import join_names, write_many, write_number
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.reading import is_there
from mismatch_probe.records.answers import GROWTH, VERDICT, CheckAnswer, CheckResult, GateResult
from mismatch_probe.records.files import TRAININGS, RunKind, kind_of
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.lines import CurvesDirectory
from mismatch_probe.records.manifest import Manifest, ModelIdentity
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.stats.growth import LEAST_RATIO, can_show_growth
from mismatch_probe.stats.results import LEVEL
from mismatch_probe.stats.sequences import Reals, TokenPair
from mismatch_probe.verdict.findings import with_findings
from mismatch_probe.verdict.growth import growth_sentence
from mismatch_probe.verdict.headline import clause

_SMALLEST_LOSS: Final = 1e-6
"""A loss below this cancels to 0, as that of group-relative advantages on the first step, and is FP32's rounding."""


@dataclass(frozen=True)
class FirstStep:
    """The metrics of the first step that a log of metrics has, by the names that its trainer gives them."""

    number: int
    values: Mapping[str, float]

    @classmethod
    def of(cls, path: Path, where: str) -> "FirstStep":
        """
        Raises:
            UsageError: there is no log of metrics of a known name.
        """
        names = frozenset(name for names in first_step_names().values() for name in names)
        log = read_metric_log(_metrics_path(path, where), must_be_metrics=True, names=names)
        if log is None:
            raise UsageError(f"{where} {path} holds no loss, gradient norm, entropy or k3 by a name that is known")
        number = min(min(series) for series in log.series.values())
        return cls(number, {name: series[number] for name, series in log.series.items() if number in series})


def _metrics_path(path: Path, where: str) -> Path:
    """The file or folder of metrics; a training run's own file where `path` is one."""
    if not is_there(path):
        raise RunDirectoryError(f"{where} {path} does not exist; give the metrics that a trainer wrote, or its folder")
    kind = kind_of(path) if path.is_dir() else None
    if kind is RunKind.CURVES:
        raise UsageError(
            f"{where} {path} holds what was read of metrics, without the loss; give the metrics themselves: "
            f"{CurvesDirectory(path).read().source}"
        )
    if kind is not None and kind not in TRAININGS:
        raise UsageError(f"{where} {path} is {kind.noun}, and the layout is judged on the metrics of two trainings")
    return TrainingDirectory(path).metrics_path if kind in TRAININGS else path


def judge_layout(gate: GateFile, source: GateSource, run: Path, baseline: Path | None) -> GateResult:
    """Compare the first step of two trainings that differ in their parallel layout.

    Raises:
        UsageError: there is no baseline, it is the run itself, or a log lacks a metric; or they begin at other steps.
        BrokenRecord: a metric of the step is not finite.
    """
    if baseline is None:
        raise UsageError("the layout is judged against the metrics of another layout; give them with --baseline")
    if baseline.resolve() == run.resolve():
        raise UsageError(f"the baseline {baseline} is the run itself: nothing can differ; give the other layout's")
    steps = FirstStep.of(run, "the run"), FirstStep.of(baseline, "the baseline")
    if steps[0].number != steps[1].number:
        raise UsageError(
            f"the metrics of the run begin at step {steps[0].number}, those of the baseline at step {steps[1].number}: "
            "later steps differ by training; give logs that begin at the same step"
        )
    _require_metrics(gate.layout, *steps)
    results = [_layout_result(check, *steps) for check in gate.layout]
    num_broken = sum(result.level == "error" and result.answer == "fail" for result in results)
    num_blocking = sum(result.level == "error" for result in results)
    limits = f"{num_blocking} {'limit is' if num_blocking == 1 else 'limits are'}"
    at_step = f"at step {steps[0].number}, the first of both layouts"
    return GateResult(
        tool_version=__version__,
        answer="fail" if num_broken else "pass",
        exit_code=ExitCode.GATE_FAILED if num_broken else ExitCode.PASS,
        sentence=f"Fail: {num_broken} of {limits} broken {at_step}."
        if num_broken
        else f"Pass: {limits} kept {at_step}.",
        run=str(run),
        gate_file=source_name(source),
        gate_key=content_key(gate.model_dump(mode="json")),
        baseline=str(baseline),
        checks=results,
        notes=["metrics do not show that both layouts trained on the same batch from the same weights"],
    )


def source_name(source: GateSource) -> str:
    """The gate file's path, or `preset NAME`."""
    return str(source) if isinstance(source, Path) else f"preset {source}"


def _require_metrics(checks: Sequence[LayoutCheck], run: FirstStep, baseline: FirstStep) -> None:
    """
    Raises:
        UsageError: a metric is in one of the logs at most.
    """
    absent = [LAYOUT_METRICS[check.metric].words for check in checks if _common_name(check, run, baseline) is None]
    if absent:
        present = [check.metric for check in checks if _common_name(check, run, baseline) is not None]
        instead = f"a gate file with {join_names(present)} alone judges without them" if present else "no check is left"
        raise UsageError(
            f"{join_names(absent)} of step {run.number} do not stand in both logs by one name: log them; {instead}"
        )


def _common_name(check: LayoutCheck, run: FirstStep, baseline: FirstStep) -> str | None:
    names = first_step_names()[LAYOUT_METRICS[check.metric].quantity]
    return next((name for name in names if name in run.values and name in baseline.values), None)


def _layout_result(check: LayoutCheck, run: FirstStep, baseline: FirstStep) -> CheckResult:
    name = _common_name(check, run, baseline)
    assert name is not None
    metric, value, before = LAYOUT_METRICS[check.metric], run.values[name], baseline.values[name]
    if not np.isfinite([value, before]).all():
        raise BrokenRecord(f"{metric.words} ({name}) of step {run.number} is not finite: nothing is judged")
    distance = abs(value - before)
    is_void = metric.quantity == "loss" and max(abs(value), abs(before)) < _SMALLEST_LOSS
    if metric.is_relative:
        distance = 0.0 if is_void else distance / max(abs(before), _SMALLEST_LOSS)
    is_kept = check.is_kept_by(distance)
    share = f"{100 * distance:.3g} %" if metric.is_relative else write_number(distance)
    comparison = f"{share} from the baseline's {write_number(before)}" if distance else "equal to the baseline's"
    comparison = "both cancel to 0" if is_void else comparison
    judgement = f"{check.bound} is {'kept' if is_kept else 'broken'}"
    return CheckResult(
        metric=check.metric,
        measured=check.metric,
        pair=f"step {run.number}",
        kind=check.kind,
        limit=check.limit,
        level="error" if check.level == "error" else "warn",
        answer="pass" if is_kept else "fail",
        sentence=f"{metric.words} of step {run.number} ({name}) is {write_number(value)}, {comparison}; {judgement}",
        value=distance,
        low=None,
        high=None,
        bound_level=0.0,
        p_value=None,
        holm_level=None,
        passing_limit=distance,
        run_value=value,
        baseline_value=before,
        comparison=None,
        num_sequences=0,
        num_tokens=0,
        by="token",
        source=check.source,
    )


_SPARSE_INDEX: Final = re.compile(r"DeepseekV(?:32|4)|Dsa", re.ASCII)
"""Architectures whose attention chooses tokens by a sparse index: DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM."""


def require_batch_invariance(model: ModelIdentity) -> None:
    """Require an architecture that engines compute batch-invariantly.

    Raises:
        UsageError: its attention chooses tokens by a sparse index.
    """
    if _SPARSE_INDEX.search(model.architecture):
        raise UsageError(
            f"the preset bitwise cannot be asked of {model.name}: a {model.architecture} chooses the tokens that it "
            "attends to by a sparse index, which batch-invariant mode does not make repeatable (vLLM 57815, 48305); "
            "use a limit on abs_logprob_diff"
        )


_TWICE: Final = {
    "pi_again": "the training path, twice",
    "pi_other_batch": "the training path, alone and in a batch",
    "mu_other_batch": "the engine's prefill, alone and in a batch",
    "mu_cached": "the engine, with and without the prefix cache",
    "mu_decoded_alone": "the engine's decode, alone and among others",
    "mu_siblings": "the engine, in responses that begin alike",
    "pi_siblings": "the trainer, in responses that begin alike",
}


def equality_results(evidence: Mapping[PairName, Evidence]) -> list[CheckResult]:
    """Whether everything that a side of a pair computed twice is equal bit for bit, one result each; of a pair of which
    nothing was, one that is inconclusive.
    """
    return [result for name, each in evidence.items() for result in _equality_results_of(name, each.pair)]


def _equality_results_of(name: PairName, pair: TokenPair) -> list[CheckResult]:
    legs = list(_legs_computed_twice(pair))
    return [_equality_result(name, words, first, second, pair) for words, first, second in legs] or [_open_result(name)]


def _legs_computed_twice(pair: TokenPair) -> Iterator[tuple[str, Reals, Reals]]:
    if pair.log_mu_prefill is not None:
        yield "the engine, by decode and by prefill", pair.log_mu, pair.log_mu_prefill
    for name, words in _TWICE.items():
        if name in pair.repeats:
            yield words, pair.repeats[name].first, pair.repeats[name].second


def _equality_result(name: PairName, words: str, first: Reals, second: Reals, pair: TokenPair) -> CheckResult:
    is_equal = first == second
    share, num_tokens = float(is_equal.mean()), int(is_equal.size)
    others = num_tokens - int(is_equal.sum())
    what = f"log-probs of {words}, in {sides_label(*name)}"
    sentence = (
        f"{what}: {others} of {write_many(num_tokens, 'token')} differ; == 1 is broken"
        if others
        else f"{what}: {write_many(num_tokens, 'token')} are equal; == 1 is kept"
    )
    size = (pair.sequences.num_sequences, num_tokens)
    return _repetition_result(name, words, share, size, "fail" if others else "pass", sentence)


def _open_result(name: PairName) -> CheckResult:
    sentence = f"log-probs of what a side computes twice, in {sides_label(*name)}: neither side computed anything twice"
    return _repetition_result(name, "what a side computes twice", 0.0, (0, 0), "inconclusive", sentence)


def _repetition_result(
    name: PairName, words: str, share: float, size: tuple[int, int], answer: CheckAnswer, sentence: str
) -> CheckResult:
    """`size` is the numbers of sequences and tokens."""
    num_sequences, num_tokens = size
    return CheckResult(
        metric="bitwise_equal",
        measured=f"bitwise_equal of {words}",
        pair=pair_text(name),
        kind="equal",
        limit=1.0,
        level="error",
        answer=answer,
        sentence=sentence,
        value=share,
        low=None,
        high=None,
        bound_level=0.0,
        p_value=None,
        holm_level=None,
        passing_limit=None,
        run_value=share,
        baseline_value=None,
        comparison=None,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        by="token",
        source="vLLM, batch-invariant mode",
    )


def growth_results(settings: GateSettings, samples: Collection[Sample]) -> list[CheckResult]:
    """Whether the KL of each pair grows over the steps of a log, by the test that the report has for its headline; of a
    pair that has too few responses to show it, none.
    """
    judged_samples = [] if settings.growth == "off" else [each for each in samples if has_growth_to_show(each)]
    return [_growth_result(sample, blocks=settings.growth == "error") for sample in judged_samples]


def notes_on_growth(settings: GateSettings, samples: Collection[Sample]) -> list[str]:
    """A sentence where none of the pairs of a log can show a growth that was to be judged."""
    if settings.growth == "off" or any(map(has_growth_to_show, samples)):
        return []
    return ["growth of the KL over the steps was not judged: one step, or too few responses to show one"]


def has_growth_to_show(sample: Sample) -> bool:
    """Whether a pair has responses of several steps, and enough of them to show a growth."""
    pair = sample.data.pair
    if pair is None or pair.sequences.steps is None:
        return False
    has_step = pair.sequences.steps >= 0
    return bool(has_step.any()) and can_show_growth(
        pair.sequences.steps[has_step], pair.sequences.cluster_index[has_step]
    )


def _growth_result(sample: Sample, *, blocks: bool) -> CheckResult:
    """Growth from 0 has no ratio, and the largest number stands for it."""
    pair, growth = sample.data.pair, growth_over_steps(sample.data, LEVEL)
    assert pair is not None
    ratio = None if growth is None else growth.ratio
    sentence = "no growth of the KL over the steps is shown"
    if growth is not None:
        sentence = growth_sentence(growth) + ("" if blocks else '; growth = "error" in [gate] makes that block')
    return CheckResult(
        metric=GROWTH,
        measured="growth over steps",
        pair=pair_text(sample.name),
        kind="max",
        limit=LEAST_RATIO,
        level="error" if blocks else "warn",
        answer="pass" if growth is None else "fail",
        sentence=sentence,
        value=1.0 if growth is None else sys.float_info.max if ratio is None else ratio.value,
        low=None if ratio is None else ratio.low,
        high=None if ratio is None else ratio.high,
        bound_level=LEVEL,
        p_value=None if growth is None else growth.p_value,
        holm_level=None,
        passing_limit=None,
        run_value=1.0 if growth is None else growth.last.value,
        baseline_value=None,
        comparison=None,
        num_sequences=pair.sequences.num_sequences,
        num_tokens=pair.sequences.num_tokens,
        by="token",
        source="",
    )


def verdict_results(settings: GateSettings, run: Path, manifest: Manifest) -> list[CheckResult]:
    """The run's own verdict on each pair, since limits on size pass a small bug. Where it does not block, only pairs of
    which it is a bug have a row, and a document of what was found later that cannot be read changes no answer: the
    page names it.

    Raises:
        BrokenRecord: such a document cannot be read, and the verdict blocks.
    """
    directory = RunDirectory(run)
    if settings.verdict == "off" or not directory.summary_path.exists():
        return []
    blocks = settings.verdict == "error"
    summary = directory.read_summary()
    try:
        summary = with_findings(summary, Findings(run).documents())
    except BrokenRecord:
        if blocks:
            raise
    pairs = [pair for pair in summary.pairs if (pair.train, pair.infer) in manifest.settings.pairs]
    return [_verdict_result(pair, blocks=blocks) for pair in pairs if blocks or pair.verdict.kind == "bug"]


def _verdict_result(pair: PairSummary, *, blocks: bool) -> CheckResult:
    is_bug = pair.verdict.kind == "bug"
    sentence = f"the run's own verdict on {sides_label(pair.train, pair.infer)} is "
    if is_bug:
        sentence += f"a bug: {clause(pair.verdict.sentence)}"
        sentence += "" if blocks else '; verdict = "error" in [gate] makes that block'
    else:
        sentence += pair.verdict.kind
    return CheckResult(
        metric=VERDICT,
        measured=VERDICT,
        pair=pair_text((pair.train, pair.infer)),
        kind="equal",
        limit=0.0,
        level="error" if blocks else "warn",
        answer="fail" if is_bug else "pass",
        sentence=sentence,
        value=float(is_bug),
        low=None,
        high=None,
        bound_level=0.0,
        p_value=None,
        holm_level=None,
        passing_limit=None,
        run_value=float(is_bug),
        baseline_value=None,
        comparison=None,
        num_sequences=pair.counts.num_sequences,
        num_tokens=pair.counts.num_tokens,
        by="token",
        source="",
    )
