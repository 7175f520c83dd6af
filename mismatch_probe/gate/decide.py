"""From evidence and limits to an answer: pure, no files, so that simulations gate through the same code."""

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.errors import BrokenRecord, ExitCode, UsageError
from mismatch_probe.gate.claims import (
    FILED_METRICS,
    HEADROOM,
    LOG,
    ImportedLog,
    fractions_so_far,
    look_number,
    nominal_level,
    spent_alpha,
)
from mismatch_probe.gate.config import FiledCheck, GateFile, GateSettings
from mismatch_probe.gate.measure import (
    CheckMeasurement,
    Evidence,
    Measurer,
    OpenTail,
    Prompts,
    check_sentence,
    open_tail,
    reason_to_wait,
)
from mismatch_probe.inert import command_line
from mismatch_probe.notation import write_number
from mismatch_probe.records.answers import CheckAnswer, CheckResult, Look
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.records.files import HEADROOM_FILE
from mismatch_probe.records.findings import Findings, Localization, localize_file
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.stats.zeros import MOST_LEFT_OUT_OF_A_PASS
from mismatch_probe.verdict.headline import RUN, localize_command


@dataclass(frozen=True)
class GateDecision:
    """The answer of a gate, with the look and the checks that it rests on."""

    answer: CheckAnswer
    look: Look
    checks: list[CheckResult]

    def exit_code(self, settings: GateSettings) -> ExitCode:
        """The exit code of the answer under `on_inconclusive`.

        No setting turns a sample into a pass that is too small for the first look, has too few prompts, leaves out too
        many tokens, or lacks what a check looks at.
        """
        if self.answer == "inconclusive":
            lacks = self.with_too_few_prompts(settings) or self.with_too_much_left_out or self.untested_checks
            is_enough = self.look.number and not lacks
            code = ExitCode.PASS if is_enough else ExitCode.INCONCLUSIVE
            return {
                "extend": ExitCode.INCONCLUSIVE,
                "warn": code,
                "pass": code,
                "fail": ExitCode.GATE_FAILED,
            }[settings.on_inconclusive]
        return ExitCode.PASS if self.answer == "pass" else ExitCode.GATE_FAILED

    def with_too_few_prompts(self, settings: GateSettings) -> list[CheckResult]:
        """Blocking checks that rest on fewer prompts than a pass needs."""
        return [
            check
            for check in self.checks
            if check.level == "error" and check.num_prompts is not None and check.num_prompts < settings.min_prompts
        ]

    @property
    def with_too_much_left_out(self) -> list[CheckResult]:
        """Blocking checks on data of which more tokens lack a log-prob than a pass tolerates."""
        return [check for check in self.checks if check.level == "error" and check.left_out > MOST_LEFT_OUT_OF_A_PASS]

    @property
    def untested_checks(self) -> list[CheckResult]:
        """Blocking checks on what the run does not have."""
        return [check for check in self.checks if check.level == "error" and check.is_untested]


@dataclass(frozen=True)
class _Test:
    """A measured check, the p-value of the metric being beyond the limit, and the level of the test."""

    measurement: CheckMeasurement
    p_value: float
    level: float
    fails: bool


def decide(gate: GateFile, measurer: Measurer, results: Sequence[CheckResult] = ()) -> GateDecision:
    """Decide every check at the look that the evidence has reached.

    A check fails where its one-sided clustered bound lies beyond the limit, at a level that keeps the chance of any
    false failure among the blocking checks, over all looks, at alpha (Holm inside a look, alpha spending over looks).
    It passes where the opposite bound, with what the sample is too small to show, keeps the limit and rests on enough
    prompts: all must, so each is tested at the look's full level and a wrong pass is as rare [Berger 1982,
    Technometrics 24:295]. Anything else is inconclusive.
    A check with `equal` is exact, and so are the checks in `results`.
    """
    settings = gate.settings
    look = _current_look(settings, measurer.evidence.values(), results)
    measurements = [measurement for check in gate.checks for measurement in measurer.measure(check)]
    tests = _tested_checks(measurements, settings, look)
    checks = [*(_check_result(test, look, settings) for test in tests), *results]
    return GateDecision(_overall_answer(checks), look, checks)


def _current_look(settings: GateSettings, evidence: Collection[Evidence], results: Sequence[CheckResult]) -> Look:
    """The look that the sample has reached; number 0, which decides nothing, where it is too small for the first.
    Without a pair it is of the sequences of exact results.
    """
    of_results = max((result.num_sequences for result in results), default=0)
    num_sequences = min((pair_evidence.num_sampled for pair_evidence in evidence), default=of_results)
    number = look_number(settings.looks, num_sequences)
    fractions = fractions_so_far(settings.looks, num_sequences)
    return Look(
        number=number,
        declared=settings.looks,
        num_sequences=num_sequences,
        num_prompts=min((pair_evidence.pair.sequences.num_clusters for pair_evidence in evidence), default=None),
        min_prompts=settings.min_prompts,
        fraction=fractions[-1],
        spent=spent_alpha(settings.alpha, fractions[-1]) if number else 0.0,
        nominal_level=nominal_level(settings.alpha, fractions) if number else 0.0,
    )


def _tested_checks(measurements: Sequence[CheckMeasurement], settings: GateSettings, look: Look) -> list[_Test]:
    fractions = fractions_so_far(settings.looks, look.num_sequences)
    p_values = [
        measurement.claim.p_beyond(measurement.check.limit, upper=measurement.check.upper)
        if measurement.is_statistical
        else 1.0
        for measurement in measurements
    ]
    blocking = [
        index
        for index, measurement in enumerate(measurements)
        if measurement.check.level == "error" and measurement.is_statistical
    ]

    def nominal(share: int) -> float:
        return nominal_level(settings.alpha / share, fractions) if look.number else 0.0

    is_rejected = dict(zip(blocking, holm_rejected([p_values[index] for index in blocking], nominal), strict=True))
    tests = []
    for index, (measurement, p_value) in enumerate(zip(measurements, p_values, strict=True)):
        level = nominal(len(blocking)) if index in is_rejected else look.nominal_level
        tests.append(_Test(measurement, p_value, level, is_rejected.get(index, p_value <= level)))
    return tests


def _check_result(test: _Test, look: Look, settings: GateSettings) -> CheckResult:
    measurement, check = test.measurement, test.measurement.check
    prompts = Prompts(measurement.num_prompts, settings.min_prompts)
    low, high = (
        measurement.claim.bounds(look.nominal_level) if measurement.is_statistical and look.number else (None, None)
    )
    answer = _answer_of_test(test, look, prompts)
    can_pass = prompts.are_enough and measurement.can_pass
    passing = None
    if measurement.is_statistical and can_pass and look.number:
        passing = measurement.claim.passing(look.nominal_level, check.upper, 1.0)
    is_open = answer == "inconclusive"
    open_tail = _open_tail_of(measurement, look) if is_open and can_pass and look.number else None
    waits_for = reason_to_wait(measurement, open_tail, look, prompts) if is_open else ""
    return CheckResult(
        metric=check.name,
        measured=check.subject,
        pair=measurement.pair,
        kind=check.kind,
        limit=check.limit,
        level="error" if check.level == "error" else "warn",
        answer=answer,
        sentence=check_sentence(measurement, answer, waits_for, (low, high), passing),
        waits_for=waits_for,
        value=measurement.claim.value,
        low=low,
        high=high,
        bound_level=look.nominal_level,
        p_value=test.p_value if measurement.is_statistical else None,
        holm_level=test.level if measurement.is_statistical else None,
        passing_limit=passing,
        tail_is_open=open_tail is not None,
        tokens_to_decide=None if open_tail is None else open_tail.tokens,
        run_value=measurement.run.value,
        run_low=measurement.run.low,
        run_high=measurement.run.high,
        baseline_value=None if measurement.baseline is None else measurement.baseline.value,
        comparison=measurement.comparison,
        num_sequences=measurement.run.num_sequences,
        num_tokens=measurement.run.num_tokens,
        num_prompts=measurement.num_prompts,
        left_out=measurement.left_out,
        by=measurement.run.by,
        source=check.source,
    )


def _open_tail_of(measurement: CheckMeasurement, look: Look) -> OpenTail | None:
    if not measurement.is_statistical:
        return None
    return open_tail(measurement.claim, measurement.check, measurement.run.num_tokens, look.nominal_level)


def _answer_of_test(test: _Test, look: Look, prompts: Prompts) -> CheckAnswer:
    measurement, check = test.measurement, test.measurement.check
    if not measurement.is_statistical:
        if not check.is_kept_by(measurement.claim.value):
            return "fail"
        return "pass" if look.number and prompts.are_enough and measurement.can_pass else "inconclusive"
    if not look.number:
        return "inconclusive"
    if test.fails:
        return "fail"
    is_kept = measurement.claim.within(check.limit, look.nominal_level, upper=check.upper)
    return "pass" if is_kept and prompts.are_enough and measurement.can_pass else "inconclusive"


def _overall_answer(checks: Sequence[CheckResult]) -> CheckAnswer:
    answers = {check.answer for check in checks if check.level == "error"}
    if "fail" in answers:
        return "fail"
    return "inconclusive" if "inconclusive" in answers else "pass"


def holm_rejected(p_values: Sequence[float], nominal: Callable[[int], float]) -> list[bool]:
    """Which hypotheses are rejected [Holm 1979, Scandinavian Journal of Statistics 6:65].

    `nominal(m)` is the level of a test that gets an m-th of the error budget; with looks it is the look's own level
    for alpha / m, which makes this the group-sequential step-down procedure of Maurer and Bretz [2013, Statistics in
    Biopharmaceutical Research 5:311].
    """
    is_rejected = [False] * len(p_values)
    for number, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > nominal(len(p_values) - number):
            break
        is_rejected[index] = True
    return is_rejected


def filed_results(checks: Sequence[FiledCheck], run: Path, manifest: Manifest) -> list[CheckResult]:
    """Decide every check on a document that is filed with a run."""
    return [result for check in checks for result in _results_of_filed(check, run, manifest)]


def _results_of_filed(check: FiledCheck, run: Path, manifest: Manifest) -> Iterator[CheckResult]:
    if check.metric in LOG:
        yield _log_result(check, run, manifest)
        return
    if check.metric in HEADROOM:
        path = run / HEADROOM_FILE
        command = command_line("headroom", "--run", run)
        yield _filed_result(check, Findings(run).headroom(), Dtype.FP16, path, manifest, command)
        return
    localizations = Findings(run).localizations()
    for pair in manifest.settings.pairs if check.slice.pair is None else (check.slice.pair,):
        localization = next((document for document in localizations if document.settings.names == pair), None)
        command = localize_command(*pair).replace(RUN, shlex.quote(str(run)))
        yield _filed_result(check, localization, "/".join(pair), run / localize_file(*pair), manifest, command)


def _filed_result(
    check: FiledCheck, document: Headroom | Localization | None, pair: str, path: Path, manifest: Manifest, command: str
) -> CheckResult:
    """The result is shown with `pair`; `command` is the command that makes the document."""
    make_it = f"make it with `{command}`"
    if document is None:
        raise BrokenRecord(f"the check {check} needs {path}, which is not there: {make_it}")
    if document.model_fingerprint != manifest.model.fingerprint:
        raise BrokenRecord(f"{path} is of another checkpoint than the run: remove it and {make_it}")
    value = FILED_METRICS[check.metric].read(document)
    if isinstance(value, str):
        raise BrokenRecord(f"the check {check} cannot be answered by {path}, because {value}: remove it and {make_it}")
    return _exact_result(check, value, pair, f" of {_side_or_pair_label(pair)}", _document_size(document))


def _log_result(check: FiledCheck, run: Path, manifest: Manifest) -> CheckResult:
    """The result of a check on what `import` found.

    Raises:
        UsageError: the run was not imported, or its log has nothing that the metric is of.
    """
    if manifest.log is None:
        raise UsageError(f"the check {check} is on a log, and {run} was not imported from one: take the check out")
    value = FILED_METRICS[check.metric].read(ImportedLog(manifest.log, Findings(run).explanations()))
    if isinstance(value, str):
        raise UsageError(
            f"the check {check} has no answer for {run}, because {value}: take the check out, or import a log that "
            "records it"
        )
    size = (manifest.log.num_responses, manifest.log.num_sampled_tokens)
    return _exact_result(check, value, "/".join(manifest.settings.pairs[0]), "", size)


def _exact_result(check: FiledCheck, value: float, pair: str, whose: str, size: tuple[int, int]) -> CheckResult:
    """The result on a value without an interval; `size` is the numbers of sequences and tokens that it is made from."""
    is_kept = check.is_kept_by(value)
    what = f"{check.metric.replace('_', ' ')}{whose} is {write_number(value)}"
    num_sequences, num_tokens = size
    return CheckResult(
        metric=check.metric,
        measured=check.metric,
        pair=pair,
        kind=check.kind,
        limit=check.limit,
        level="error" if check.level == "error" else "warn",
        answer="pass" if is_kept else "fail",
        sentence=f"{what}; {check.bound} is {'kept' if is_kept else 'broken'}",
        value=value,
        low=None,
        high=None,
        bound_level=0.0,
        p_value=None,
        holm_level=None,
        passing_limit=None if check.kind == "equal" else value,
        run_value=value,
        baseline_value=None,
        comparison=None,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        by="token",
        source=check.source,
    )


def _side_or_pair_label(pair: str) -> str:
    """The label of two sides, or of one dtype, as in the report."""
    sides = pair.split("/")
    return sides_label(sides[0], sides[-1])


def _document_size(document: Headroom | Localization) -> tuple[int, int]:
    """The numbers of sequences and tokens that the document is made from."""
    if isinstance(document, Localization):
        return document.looked_into_sequences, document.looked_into_tokens
    activations = document.activations
    return (0, 0) if activations is None else (activations.num_sequences, activations.num_tokens)
