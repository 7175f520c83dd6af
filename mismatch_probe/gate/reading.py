"""From run directories to evidence: the run, its baseline, its noise floor, and the model that it measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import (
    Overlap,
    Sample,
    by_prefill,
    meet,
    pair_text,
    read_samples,
    side_against_itself,
)
from mismatch_probe.difference.versus import part_of, traced_metrics
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.gate.claims import has_regression, regression
from mismatch_probe.gate.config import Check, GateFile
from mismatch_probe.gate.measure import Evidence, check_complete, check_finished, sound_pair
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.gate_result import Floor, FloorEntry
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.manifest import Manifest, read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.stats.zeros import Gaps


@dataclass(frozen=True)
class Identity:
    """fingerprints: of the checkpoint, or of those that an imported log was explained with and that fitted it.

    names: the checkpoint's, or those that the log gives. is_log: nothing but the log and its explanations say it.
    """

    fingerprints: frozenset[str]
    names: tuple[str, ...]
    is_log: bool

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> "Identity":
        """
        Raises:
            BrokenRecord: an explanation in the run cannot be read.
        """
        model, log = manifest.model, manifest.log
        if model.fingerprint or log is None:
            return cls(frozenset({model.fingerprint}), (model.name,), is_log=False)
        fitted = [explanation for explanation in Findings(path).explanations() if explanation.fits_the_log]
        known = frozenset(explanation.model_fingerprint for explanation in fitted if explanation.model_fingerprint)
        return cls(known, tuple(log.models), is_log=True)

    def __str__(self) -> str:
        named = ", ".join(self.names) or "a model that its log does not name"
        return f"{named}, fingerprint {', '.join(sorted(self.fingerprints)) or 'not known'}"


def check_same_model(run: Identity, baseline: Identity, where: str) -> None:
    """Two runs of one model, by their checkpoints, or by the one name that each log gives.

    Raises:
        UsageError: they are of two.
    """
    fingerprints_differ = (
        run.fingerprints and baseline.fingerprints and run.fingerprints.isdisjoint(baseline.fingerprints)
    )
    both_named = run.is_log and baseline.is_log and len(run.names) == len(baseline.names) == 1
    if fingerprints_differ or (both_named and run.names != baseline.names):
        raise UsageError(
            f"{where} is of another model ({baseline}; the run has {run}): give a baseline of the same checkpoint"
        )


def unchecked(run: Identity, other: Identity, what: str) -> Iterator[str]:
    """What cannot be told of two runs of which one is a log; `what` the other one is (`the baseline`)."""
    unknown = [
        name for name, identity in (("the run", run), (what, other)) if identity.is_log and not identity.fingerprints
    ]
    if unknown:
        yield (
            f"it was not checked that {what} is of the same model: the log of {' and of '.join(unknown)} does not say "
            "which checkpoint sampled it; `mismatch-probe explain RUN --model CHECKPOINT` records it"
        )


_SAME_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos")


@dataclass(frozen=True)
class OpenRun:
    """A finished run with its samples read."""

    path: Path
    manifest: Manifest
    samples: dict[PairName, Sample]
    identity: Identity


def open_run(path: Path, what: str) -> OpenRun:
    """Read a run; `what` it is (`the run`, `the baseline`) goes into messages.

    Raises:
        RunDirectoryError: there is no run.
        BrokenRecord: it is unfinished or damaged.
    """
    run = RunDirectory(path)
    if not path.exists():
        raise RunDirectoryError(f"{what} {path} does not exist; give a folder that compare --out wrote")
    manifest = run.read_manifest()
    check_finished(manifest, path, f"{what} {path}")
    samples = read_samples(run, manifest)
    num_asked = _num_asked(run, manifest)
    check_complete(samples.values(), num_asked, path, f"{what} {path}")
    return OpenRun(path, manifest, samples, Identity.of(path, manifest))


def evidence_of(run: OpenRun, baseline: OpenRun | None) -> dict[PairName, Evidence]:
    """Every pair of the run as evidence, none of it before all of it is sound.

    Raises:
        BrokenRecord: data of the run or of the baseline must not be judged.
        UsageError: the baseline is of another model, other prompts, or sampled otherwise.
    """
    where = f"the run {run.path}"
    pairs = {name: sound_pair(sample, run.manifest, where) for name, sample in run.samples.items()}
    if baseline is None:
        return {
            name: Evidence(pair, run.samples[name].num_sampled, gaps=_gaps(run.samples[name]))
            for name, pair in pairs.items()
        }
    _check_another(run, baseline)
    check_comparable(run, baseline)
    return {name: _beside(run.samples[name], baseline, pairs[name].sequences.num_sequences) for name in pairs}


def _beside(sample: Sample, baseline: OpenRun, num_usable: int) -> Evidence:
    where = f"the baseline {baseline.path}"
    old = baseline.samples.get(sample.name)
    if old is None:
        raise UsageError(f"{where} has no pair {pair_text(sample.name)}; make it again with that dtype too")
    sound_pair(old, baseline.manifest, where)
    if sample.is_by_prefill:
        old = by_prefill(old)
    elif old.is_by_prefill:
        raise UsageError(
            f"{where} holds responses scored again, whose engine is known by prefill alone, and the run decoded "
            "its own: give the baseline that sampled"
        )
    meeting = meet(old, sample)
    _check_overlap(meeting.overlap, where, num_usable)
    return Evidence(
        pair=meeting.second,
        num_sampled=sample.num_sampled,
        baseline=meeting.first,
        comparison="paired" if meeting.overlap.is_paired else "two-sample",
        gaps=_gaps(sample, old),
    )


def _gaps(*samples: Sample) -> tuple[Gaps, ...]:
    return tuple(sample.data.gaps for sample in samples if sample.data.gaps is not None)


def _check_overlap(overlap: Overlap, where: str, num_usable: int) -> None:
    if not overlap.prompts:
        raise UsageError(
            f"{where} shares no prompt with the run's {num_usable} responses; make it from the same prompts"
        )
    if overlap.changed_prompts:
        raise UsageError(
            f"{overlap.changed_prompts} of {overlap.prompts} prompts have other token ids in {where} (another "
            "tokenizer, template or seed): the two are not comparable; make the baseline again on purpose"
        )


def _check_another(run: OpenRun, baseline: OpenRun) -> None:
    """A run, or a copy of it, grown or not, shows no change against itself, whatever happened to it."""
    made = [(side.manifest.created_at, side.manifest.command) for side in (run, baseline)]
    if made[0] == made[1]:
        raise UsageError(
            f"the baseline {baseline.path} is the run itself, or a copy of it: nothing can have changed; "
            "give the run that was kept from before"
        )


def check_comparable(run: OpenRun, baseline: OpenRun) -> None:
    """The same checkpoint, sampled alike.

    Raises:
        UsageError: it is another checkpoint, or sampled otherwise.
    """
    old, new = baseline.manifest, run.manifest
    check_same_model(run.identity, baseline.identity, f"the baseline {baseline.path}")
    for name in _SAME_SAMPLING:
        was, now = getattr(old.settings.sampling, name), getattr(new.settings.sampling, name)
        if was != now:
            raise UsageError(
                f"the baseline {baseline.path} was sampled with {name} = {was}, the run with {now}: "
                "give a baseline with the same sampling"
            )


def _num_asked(run: RunDirectory, manifest: Manifest) -> int:
    """How many responses each sampler has: of a log those that were imported, else as many as were to be sampled."""
    if manifest.log is not None:
        return manifest.log.analysed_responses
    num_prompts: int = read_prompts(run, manifest.run_key, ["prompt_id"]).num_rows
    return num_prompts * manifest.settings.sampling.samples_per_prompt


def write_floor(path: Path, floor: Floor) -> None:
    write_document(path, floor)


def read_floor(path: Path) -> Floor:
    """The measured floor.

    Raises:
        RunDirectoryError: the file is not there.
        BrokenRecord: it cannot be read.
    """
    return read_document(
        path,
        Floor,
        missing="the gate file names it as floor; make it with gate calibrate, or take floor out",
        fix="make it again with gate calibrate",
    )


def check_above_floor(gate: GateFile, floor: Floor, run: OpenRun) -> None:
    """No limit asks for less than an unchanged set-up shows.

    Raises:
        UsageError: one does, or the floor was measured on another model or without this check.
    """
    if floor.model_fingerprint != run.manifest.model.fingerprint:
        raise UsageError("the floor was measured on another model; measure it again with gate calibrate")
    known = {(entry.pair, entry.measured): entry for entry in floor.entries}
    for check in checks_with_floor(gate):
        for name in [check.slice.pair] if check.slice.pair else run.samples:
            entry = known.get((pair_text(name), check.measured))
            if entry is None:
                raise UsageError(
                    f"the floor of {check.measured} was never measured for {pair_text(name)}; calibrate again"
                )
            least = entry.change if check.kind == "max_regression" else entry.same_leg
            if least is None and check.kind == "max_regression":
                raise UsageError(
                    f"the floor of {check} was measured from one run, which shows no change; give gate calibrate two"
                )
            if least is not None and not _is_above(check, least):
                raise UsageError(
                    f"the check {check} on {entry.pair} is below the noise floor: an unchanged set-up shows "
                    f"{least:.3g}; move the limit past that, or calibrate with more sequences"
                )


def _is_above(check: Check, least: float) -> bool:
    return check.limit > least if check.upper else check.limit < least


def checks_with_floor(gate: GateFile) -> list[Check]:
    """The checks whose metric is positive by nature and judged with an interval."""
    return [check for check in gate.checks if check.is_statistical and has_regression(check.name)]


_SAME_LEG = ("pi_again", "pi_other_batch")


def calibrate(gate: GateFile, runs: Sequence[OpenRun]) -> Floor:
    """Measure the floor of every check that has an interval, from runs of one set-up; how much a metric changes between
    runs takes two of them.

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
    shared = [name for name in first.samples if all(name in run.samples for run in runs)]
    if not shared:
        raise UsageError("the runs have no pair of dtypes in common; run the same comparison twice")
    entries = [entry for name in shared for entry in _entries(gate, [run.samples[name] for run in runs])]
    if not any(entry.is_measured for entry in entries):
        raise UsageError("nothing was computed twice: run the same comparison again and give both: gate calibrate A B")
    return Floor(
        model_fingerprint=first.manifest.model.fingerprint,
        runs=[str(run.path) for run in runs],
        num_sequences=min(run.samples[name].num_sampled for run in runs for name in shared),
        entries=entries,
    )


def _entries(gate: GateFile, samples: Sequence[Sample]) -> Iterator[FloorEntry]:
    by_measured = {check.measured: check for check in checks_with_floor(gate)}
    for measured, check in by_measured.items():
        twice = [
            *(pair for sample in samples for pair in _repeats(sample)),
            *(pair for two in combinations(samples, 2) for pair in side_against_itself(*two).values()),
        ]
        same = [_metric(check, pair) for pair in twice]
        change = [_change(check, gate.settings.alpha, *two) for two in combinations(samples, 2)]
        yield FloorEntry(
            pair=pair_text(samples[0].name),
            measured=measured,
            same_leg=_worst(check, [metric.value for metric in same if metric is not None]),
            change=max((value for value in change if value is not None), default=None),
        )


def _worst(check: Check, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return min(values) if check.higher_is_better else max(values)


def _repeats(sample: Sample) -> list[TokenPair]:
    """The training path's log-probs, computed twice within one run: again, and in another batch."""
    assert sample.data.pair is not None
    repeats = (sample.data.pair.repeats.get(name) for name in _SAME_LEG)
    return [TokenPair(both.sequences, log_pi=both.second, log_mu=both.first) for both in repeats if both is not None]


def _metric(check: Check, pair: TokenPair) -> Estimate | None:
    part = part_of(
        pair, position=check.slice.position, length=check.slice.length, step=check.slice.step, clip=check.clip
    )
    return None if part is None else traced_metrics(part, names=[check.name])[0].get(check.name)


def _change(check: Check, alpha: float, first: Sample, second: Sample) -> float | None:
    """The largest relative change of the metric that two runs of the same set-up leave possible at this alpha."""
    meeting = meet(first, second)
    old, new = (_metric(check, pair) for pair in (meeting.first, meeting.second))
    claim = None if old is None or new is None else regression(old, new, higher_is_better=check.higher_is_better)
    if claim is None:
        return None
    low, high = claim.bounds(alpha)
    return None if low is None or high is None else max(abs(low), abs(high))
