"""The commands of the gate: a run is judged by a gate file, and the noise floor is measured from repeated runs."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from mismatch_probe import __version__
from mismatch_probe.difference.runs import ill_conditioned_pairs, version_changes
from mismatch_probe.difference.samples import Sample, meet, pair_text, side_against_itself
from mismatch_probe.difference.versus import part_of, traced_metrics
from mismatch_probe.dtypes import side_label
from mismatch_probe.errors import ExitCode, MismatchProbeError, UsageError
from mismatch_probe.gate.claims import regression
from mismatch_probe.gate.config import Check, GateFile, GateSource, load_gate
from mismatch_probe.gate.decide import GateDecision, decide, filed_results
from mismatch_probe.gate.measure import Measurer, sound_pair
from mismatch_probe.gate.reading import (
    OpenRun,
    check_above_floor,
    check_comparable,
    checks_with_floor,
    evidence_of,
    open_run,
    read_floor,
    unchecked_facts,
    what_a_log_lacks,
)
from mismatch_probe.gate.run_checks import (
    equality_results,
    growth_results,
    judge_layout,
    notes_on_growth,
    require_batch_invariance,
    source_name,
    verdict_results,
)
from mismatch_probe.inert import command_line
from mismatch_probe.notation import write_many
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.records.answers import GROWTH, VERDICT, CheckResult, FloorEntry, GateResult, NoiseFloor
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.headline import KL_LIMIT, KL_LIMIT_NAME

CountPrompts = Callable[[str, int], int | None]
"""How many prompts a source has, counted up to a number; None for one that makes as many as are asked for."""


def run_gate(
    run_path: Path,
    source: GateSource,
    baseline_path: Path | None = None,
    earlier: GateResult | None = None,
    *,
    without_baseline: bool = False,
    count_prompts: CountPrompts = lambda source, most: None,
) -> GateResult:
    """Hold a run against a gate file or a preset; `earlier` is the last answer about this run.

    count_prompts: so that no look is proposed for which the source of the run has too few.
    without_baseline: checks that compare with a baseline are left out, and the result names them.
    """
    complete = open_gate(source, baseline_path, without_baseline=without_baseline)
    if complete.layout:
        return judge_layout(complete, source, run_path, baseline_path)
    gate = complete.without_regressions() if without_baseline else complete
    run = open_run(run_path, "the run", needs_pairs=bool(gate.checks))
    baseline = None if baseline_path is None else open_run(baseline_path, "the baseline")
    if gate.settings.floor is not None and isinstance(source, Path):
        check_above_floor(gate, read_floor(source.parent / gate.settings.floor), run)
    document_results = filed_results(gate.filed, run_path, run.manifest)
    evidence = evidence_of(run, baseline)
    if gate.settings.preset == "bitwise":
        require_batch_invariance(run.manifest.model)
        document_results += equality_results(evidence)
    if run.manifest.log is not None:
        document_results += growth_results(gate.settings, run.samples.values())
    document_results += verdict_results(gate.settings, run_path, run.manifest)
    decision = decide(gate, Measurer(evidence), document_results)
    is_open = decision.answer == "inconclusive"
    what_next, next_command = _next_step(decision, gate, run, source, count_prompts) if is_open else ("", None)
    gate_key = content_key(complete.model_dump(mode="json"))
    return GateResult(
        tool_version=__version__,
        answer=decision.answer,
        exit_code=decision.exit_code(gate.settings),
        sentence=_answer_sentence(decision, what_next),
        next_command=next_command,
        run=str(run_path),
        gate_file=source_name(source),
        gate_key=gate_key,
        model=run.manifest.model.name,
        model_fingerprint=run.manifest.model.fingerprint,
        baseline=None if baseline_path is None else str(baseline_path),
        alpha=gate.settings.alpha,
        on_inconclusive=gate.settings.on_inconclusive,
        look=decision.look,
        checks=decision.checks,
        notes=[*_gate_notes(gate, run, baseline), *_note_of_edited_file(gate_key, earlier)],
        left_out=[str(check) for check in complete.checks if check not in gate.checks],
        versions=run.manifest.versions,
    )


def open_gate(
    source: GateSource, baseline_path: Path | None, flag: str = "--config", *, without_baseline: bool = False
) -> GateFile:
    """Read the preset, or the gate file that `flag` named, and require what it needs, before a run is read or made.

    Raises:
        UsageError: the file cannot be used, or compares with a baseline that is not given; or every
            check of it compares with a baseline where it is used without one.
        RunDirectoryError: the baseline is no run.
    """
    gate = load_gate(source, flag)
    if gate.layout:
        return gate
    regression = next((check for check in gate.checks if check.kind == "max_regression"), None)
    if baseline_path is not None:
        if without_baseline:
            raise UsageError("--without-baseline leaves out what --baseline is for; give one of them")
        RunDirectory(baseline_path).read_manifest()
    elif regression is not None and not without_baseline:
        raise UsageError(
            f"the check {regression} compares with a baseline, and none is given; add --baseline RUN, or "
            "--without-baseline until there is one"
        )
    if without_baseline and not (gate.without_regressions().checks or gate.filed):
        raise UsageError(
            f"every check of {source_name(source)} compares with a baseline, so without one nothing is left; add a "
            "check with max or min, or make a baseline and give it with --baseline"
        )
    return gate


def refusal(error: MismatchProbeError, run_path: Path, source: GateSource) -> GateResult:
    """The result to write when nothing could be decided, so that the files keep no older answer."""
    return GateResult(
        tool_version=__version__,
        answer="error",
        exit_code=error.exit_code,
        sentence=str(error),
        run=str(run_path),
        gate_file=source_name(source),
    )


def _answer_sentence(decision: GateDecision, what_next: str) -> str:
    look = decision.look
    blocking = [check for check in decision.checks if check.level == "error"]
    size = write_many(look.num_sequences, "sequence")
    if look.num_prompts is not None:
        size += f" of {write_many(look.num_prompts, 'prompt')}"
    number = f"look {look.number} of {len(look.declared)}" if look.number else "before the first look"
    at = f"with {size} ({number})"
    if not blocking:
        return f"Pass, for no check is blocking: all {len(decision.checks)} only warn, {at}{_but(decision)}."
    checks_by_answer = {
        answer: [check for check in blocking if check.answer == answer] for answer in ("fail", "inconclusive")
    }
    if decision.answer == "pass":
        return f"Pass: {_limits_and_pairs(blocking, blocking, 'kept')} {at}{_but(decision)}."
    of_answer = checks_by_answer[decision.answer]
    if decision.answer == "fail":
        return f"Fail: {_limits_and_pairs(of_answer, blocking, 'broken')} {at}."
    return f"Inconclusive: {_limits_and_pairs(of_answer, blocking, 'neither kept nor broken')} {at}; {what_next}."


def _but(decision: GateDecision) -> str:
    """What a pass goes beside: a KL that grows, a verdict that is a bug; the first of each."""
    failures = {check.metric: check for check in reversed(decision.checks) if check.answer == "fail"}
    sentences = [failures[name].sentence.rpartition("; ")[0] for name in (GROWTH, VERDICT) if name in failures]
    return f", but {', and '.join(sentences)}" if sentences else ""


def _limits_and_pairs(checks: Sequence[CheckResult], blocking: Sequence[CheckResult], state: str) -> str:
    """`1 limit is kept by 3 pairs`, `1 of 2 limits is broken by 1 of 3 pairs`: a limit is one however many pairs it is
    put on, as in the file.
    """
    limits, of_limits = ({(each.measured, each.kind, each.limit) for each in group} for group in (checks, blocking))
    pairs, of_pairs = ({each.pair for each in group} for group in (checks, blocking))
    verb = "is" if len(limits) == 1 else "are"
    sentence = f"{_so_many_of(len(limits), len(of_limits), 'limit')} {verb} {state}"
    return sentence if len(of_pairs) == 1 else f"{sentence} by {_so_many_of(len(pairs), len(of_pairs), 'pair')}"


def _so_many_of(number: int, of: int, what: str) -> str:
    return write_many(of, what) if number == of else f"{number} of {write_many(of, what)}"


def _next_step(
    decision: GateDecision, gate: GateFile, run: OpenRun, source: GateSource, count_prompts: CountPrompts
) -> tuple[str, str | None]:
    """What would settle an inconclusive answer, and the command for it, where there is one."""
    on_inconclusive = gate.settings.on_inconclusive
    if decision.untested_checks and on_inconclusive != "fail":
        return _REPETITIONS, None
    following = decision.look.next_sequences
    is_sampled = run.manifest.log is None
    can_extend = is_sampled and isinstance(source, Path)
    command = command_line("compare", "--resume", "--out", run.path, "--gate", source) if can_extend else None
    num_held = _num_held(following, gate, run, count_prompts) if is_sampled and following is not None else None
    if num_held is not None and on_inconclusive != "fail":
        return f"{_next_look_text(decision, gate, run)}, and that holds {num_held}: {_OTHER_SOURCE}", None
    short = decision.with_too_few_prompts(gate.settings) if decision.look.number else []
    if short and on_inconclusive != "fail":
        return _more_prompts_text(short, gate, run), command
    if decision.with_too_much_left_out and decision.look.number and on_inconclusive != "fail":
        return "no setting passes what tokens without a log-prob may hide: have the log record them", None
    if on_inconclusive in ("warn", "pass") and not decision.look.number:
        return f"no setting passes what was not tested: {_next_look_text(decision, gate, run)}", command
    if on_inconclusive != "extend":
        result = "failed" if decision.exit_code(gate.settings) == ExitCode.GATE_FAILED else "passed"
        return f'{result}, because on_inconclusive = "{on_inconclusive}"', None
    if following is None:
        return "that was the last look: move the limit, or raise max_sequences", None
    return _next_look_text(decision, gate, run), command


_REPETITIONS: Final = "no setting passes what was not tested: the run needs [floors], a log several responses a prompt"
_OTHER_SOURCE: Final = "compare anew with --prompts a source of more"


def _next_look_text(decision: GateDecision, gate: GateFile, run: OpenRun) -> str:
    """A sentence on the next look and on the prompts that it takes."""
    next_sequences, settings = decision.look.next_sequences, run.manifest.settings
    assert next_sequences is not None
    which = "next" if decision.look.number else "first"
    if run.manifest.log is not None:
        return (
            f"the {which} look is at {next_sequences} sequences, and a pass needs {gate.settings.min_prompts} prompts: "
            "import a log with as many"
        )
    num_prompts = gate.settings.prompts_for(next_sequences, settings.sampling.samples_per_prompt)
    return (
        f"the {which} look is at {next_sequences} sequences, which takes {num_prompts} prompts of "
        f"{settings.prompts.source}"
    )


def _num_held(next_sequences: int, gate: GateFile, run: OpenRun, count_prompts: CountPrompts) -> int | None:
    """The prompts of the run's source, where these are too few for the next look; None where they are enough, or cannot
    be counted here.
    """
    settings = run.manifest.settings
    num_prompts = gate.settings.prompts_for(next_sequences, settings.sampling.samples_per_prompt)
    try:
        num_held = count_prompts(settings.prompts.source, num_prompts)
    except MismatchProbeError:
        return None
    return num_held if num_held is not None and num_held < num_prompts else None


def _more_prompts_text(short: Sequence[CheckResult], gate: GateFile, run: OpenRun) -> str:
    """A sentence that asks for more prompts: more responses to the same prompts do not help."""
    fewest = min(check.num_prompts or 0 for check in short)
    how = " (import a log with more)" if run.manifest.log is not None else ""
    return (
        f"a pass needs {gate.settings.min_prompts} prompts, and there are {fewest}: add prompts, not samples of the "
        f"same ones{how}, or lower min_prompts and be wrong more often"
    )


def _note_of_edited_file(gate_key: str, earlier: GateResult | None) -> list[str]:
    if earlier is None or earlier.look is None or not earlier.look.number or earlier.gate_key == gate_key:
        return []
    return [
        f"this run was judged by other limits before, with {write_many(earlier.look.num_sequences, 'sequence')}: "
        "limits chosen after a look at the same responses are wrong more often than alpha"
    ]


_KL_METRICS: Final = ("kl_k1", "kl_k2", "kl_k3")


def _gate_notes(gate: GateFile, run: OpenRun, baseline: OpenRun | None) -> list[str]:
    notes = []
    empty = sum(sample.num_empty for sample in run.samples.values())
    if empty:
        notes.append(f"{write_many(empty, 'empty response')}: counted by the look alone")
    notes += [
        f"{side_label(name)} was left out and is not judged: {why}" for name, why in run.manifest.left_out.items()
    ]
    notes += [
        f"{pair_text(name)}: {clause} on this checkpoint, so what its limits find may be rounding, which no dtype and "
        "no setting of the engine removes"
        for name, clause in ill_conditioned_pairs(RunDirectory(run.path)).items()
        if name in run.samples
    ]
    if run.manifest.log is not None:
        notes += what_a_log_lacks(run.manifest.log)
        notes += notes_on_growth(gate.settings, run.samples.values())
    if gate.checks and not any(check.metric in _KL_METRICS for check in gate.checks):
        notes.append(
            f"{KL_LIMIT_NAME}, by which pages and headlines judge, is one on the KL ({KL_LIMIT:g} nats a token): this "
            "gate does not judge the KL, and its limits are those of the table"
        )
    if baseline is not None:
        notes += unchecked_facts(run.identity, baseline.identity, "the baseline")
        changes = version_changes(baseline.manifest, run.manifest)
        what = ", ".join(str(change) for change in changes) or "no package version"
        notes.append(f"changed since the baseline: {what}")
        if baseline.manifest.created_at > run.manifest.created_at:
            notes.append("the baseline is younger than the run: if the two were swapped, what got worse passes")
        if not any(check.kind == "max_regression" for check in gate.checks):
            notes.append("no check has max_regression, so the baseline changed no answer")
    if gate.settings.floor is not None and not any(run.identity.fingerprints):
        notes.append("it was not checked that the floor is of the same model: the log does not say which one it is")
    if gate.settings.floor is None and any(check.kind == "max_regression" for check in gate.checks):
        notes.append("no noise floor was measured: `gate calibrate` says whether a margin is larger than noise")
    return notes


_SAME_LEG = ("pi_again", "pi_other_batch")


def calibrate(gate: GateFile, runs: Sequence[OpenRun]) -> NoiseFloor:
    """Measure the noise floor of every check that has an interval, from runs of one set-up.

    The change of a metric between runs needs two runs.

    Raises:
        UsageError: the runs differ in more than their seed and batch shape, or computed nothing twice.
        BrokenRecord: the data of a run must not be judged.
    """
    first = runs[0]
    for other in runs[1:]:
        check_comparable(other, first)
        if other.manifest.content_keys.get("versions") != first.manifest.content_keys.get("versions"):
            raise UsageError(
                f"{other.path} was made with other versions than {first.path}: that is a change, not a repetition"
            )
    for run in runs:
        for sample in run.samples.values():
            sound_pair(sample, run.manifest, f"the run {run.path}")
    common = [name for name in first.samples if all(name in run.samples for run in runs)]
    if not common:
        raise UsageError("the runs have no pair of dtypes in common; run the same comparison twice")
    entries = [entry for name in common for entry in _floor_entries(gate, [run.samples[name] for run in runs])]
    if not any(entry.is_measured for entry in entries):
        raise UsageError("nothing was computed twice: run the same comparison again and give both: gate calibrate A B")
    return NoiseFloor(
        model_fingerprint=first.manifest.model.fingerprint,
        runs=[str(run.path) for run in runs],
        num_sequences=min(run.samples[name].num_sampled for run in runs for name in common),
        entries=entries,
    )


def _floor_entries(gate: GateFile, samples: Sequence[Sample]) -> Iterator[FloorEntry]:
    by_measured = {check.subject: check for check in checks_with_floor(gate)}
    for subject, check in by_measured.items():
        pairs = [
            *(pair for sample in samples for pair in _pairs_computed_twice(sample)),
            *(pair for two in combinations(samples, 2) for pair in side_against_itself(*two).values()),
        ]
        same = [_metric_of_pair(check, pair) for pair in pairs]
        change = [_largest_change(check, gate.settings.alpha, *two) for two in combinations(samples, 2)]
        yield FloorEntry(
            pair=pair_text(samples[0].name),
            measured=subject,
            same_leg=_worst_value(check, [metric.value for metric in same if metric is not None]),
            change=max((value for value in change if value is not None), default=None),
        )


def _worst_value(check: Check, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return min(values) if check.higher_is_better else max(values)


def _pairs_computed_twice(sample: Sample) -> list[TokenPair]:
    """Log-probs that the training path computed twice within one run: in the same way, and in another batch."""
    assert sample.data.pair is not None
    repeats = (sample.data.pair.repeats.get(name) for name in _SAME_LEG)
    return [TokenPair(both.sequences, log_pi=both.second, log_mu=both.first) for both in repeats if both is not None]


def _metric_of_pair(check: Check, pair: TokenPair) -> Estimate | None:
    part = part_of(
        pair, position=check.slice.position, length=check.slice.length, step=check.slice.step, clip=check.clip
    )
    return None if part is None else traced_metrics(part, names=[check.name])[0].get(check.name)


def _largest_change(check: Check, alpha: float, first: Sample, second: Sample) -> float | None:
    """The largest relative change of the metric that two runs of one set-up leave possible at this alpha."""
    meeting = meet(first, second)
    old, new = (_metric_of_pair(check, pair) for pair in (meeting.first, meeting.second))
    claim = None if old is None or new is None else regression(old, new, higher_is_better=check.higher_is_better)
    if claim is None:
        return None
    low, high = claim.bounds(alpha)
    return None if low is None or high is None else max(abs(low), abs(high))
