"""Run directories become evidence: the run, its baseline, its noise floor, and the identity of its model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import (
    Overlap,
    Sample,
    by_prefill,
    meet,
    pair_text,
    read_samples,
)
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.gate.claims import has_regression
from mismatch_probe.gate.config import Check, GateFile
from mismatch_probe.gate.measure import Evidence, check_complete, check_finished, sound_pair
from mismatch_probe.notation import write_count
from mismatch_probe.records.answers import NoiseFloor
from mismatch_probe.records.findings import Findings
from mismatch_probe.records.legs import read_prompts
from mismatch_probe.records.manifest import LogOrigin, Manifest, read_document, write_document
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.stats.zeros import Gaps


@dataclass(frozen=True)
class Identity:
    """The model that a run measured."""

    fingerprints: frozenset[str]
    """The checkpoint's; of an imported log those of the checkpoints that explained it and fitted it."""
    names: tuple[str, ...]
    """The checkpoint's name, or the names that the log gives."""
    is_log: bool
    """Only the log and its explanations name the model."""

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> "Identity":
        model, log = manifest.model, manifest.log
        if model.fingerprint or log is None:
            return cls(frozenset({model.fingerprint}), (model.name,), is_log=False)
        fitting = [explanation for explanation in Findings(path).explanations() if explanation.fits_the_log]
        fingerprints = frozenset(
            explanation.model_fingerprint for explanation in fitting if explanation.model_fingerprint
        )
        return cls(fingerprints, tuple(log.models), is_log=True)

    def __str__(self) -> str:
        model_names = ", ".join(self.names) or "a model that its log does not name"
        return f"{model_names}, fingerprint {', '.join(sorted(self.fingerprints)) or 'not known'}"


def check_same_model(run: Identity, baseline: Identity, where: str) -> None:
    """Require that two runs measured one model, by their checkpoints, or by the one name that each log gives.

    Raises:
        UsageError: they measured two models.
    """
    fingerprints_differ = (
        run.fingerprints and baseline.fingerprints and run.fingerprints.isdisjoint(baseline.fingerprints)
    )
    both_named = run.is_log and baseline.is_log and len(run.names) == len(baseline.names) == 1
    if fingerprints_differ or (both_named and run.names != baseline.names):
        raise UsageError(
            f"{where} is of another model ({baseline}; the run has {run}): give a baseline of the same checkpoint"
        )


def unchecked_facts(run: Identity, other: Identity, what: str) -> Iterator[str]:
    """A sentence where a log does not say its checkpoint; `what` names the other run (`the baseline`)."""
    unknown = [
        name for name, identity in (("the run", run), (what, other)) if identity.is_log and not identity.fingerprints
    ]
    if unknown:
        yield (
            f"it was not checked that {what} is of the same model: the log of {' and of '.join(unknown)} does not say "
            "which checkpoint sampled it; `mismatch-probe explain RUN --model CHECKPOINT` records it"
        )


_MOST_STEPS_NAMED: Final = 20


def what_a_log_lacks(log: LogOrigin) -> Iterator[str]:
    """Sentences on the steps and responses that were left out, and on what the log lacks or what is doubtful in it."""
    if log.steps_left_out:
        step_names = ", ".join(map(str, log.steps_left_out[:_MOST_STEPS_NAMED]))
        more = len(log.steps_left_out) - _MOST_STEPS_NAMED
        yield f"steps of the log that are not judged: {step_names}{f' and {more} more' if more > 0 else ''}"
    if log.analysed_responses < log.num_responses:
        yield (f"judged: {write_count(log.analysed_responses)} of the log's {write_count(log.num_responses)} responses")
    yield from (f"of the log: {note.sentence}" for note in log.notes if note.level in ("missing", "warning"))


_SAME_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos")


@dataclass(frozen=True)
class OpenRun:
    """A finished run whose samples have been read."""

    path: Path
    manifest: Manifest
    samples: dict[PairName, Sample]
    identity: Identity


def open_run(path: Path, what: str, *, needs_pairs: bool = True) -> OpenRun:
    """Read a run; messages call it `what` (`the run`, `the baseline`).

    needs_pairs: a log without the trainer's side is refused, whose only pair was not scored; else it has no sample.

    Raises:
        RunDirectoryError: there is no run.
        BrokenRecord: it is unfinished or damaged.
    """
    run = RunDirectory(path)
    if not path.exists():
        raise RunDirectoryError(f"{what} {path} does not exist; give a folder that compare --out wrote")
    manifest = run.read_manifest()
    if not needs_pairs and manifest.log is not None and not any(side.logged for side in manifest.settings.train_sides):
        return OpenRun(path, manifest, {}, Identity.of(path, manifest))
    check_finished(manifest, path, f"{what} {path}")
    samples = read_samples(run, manifest)
    num_expected = _num_expected(run, manifest)
    check_complete(samples.values(), num_expected, path, f"{what} {path}")
    return OpenRun(path, manifest, samples, Identity.of(path, manifest))


def evidence_of(run: OpenRun, baseline: OpenRun | None) -> dict[PairName, Evidence]:
    """The evidence of every pair of the run, once all pairs are known to be sound."""
    where = f"the run {run.path}"
    pairs = {name: sound_pair(sample, run.manifest, where) for name, sample in run.samples.items()}
    if baseline is None:
        return {
            name: Evidence(pair, run.samples[name].num_sampled, gaps=_gaps_of(run.samples[name]))
            for name, pair in pairs.items()
        }
    _require_another_run(run, baseline)
    check_comparable(run, baseline)
    return {
        name: _evidence_with_baseline(run.samples[name], baseline, pairs[name].sequences.num_sequences)
        for name in pairs
    }


def _evidence_with_baseline(sample: Sample, baseline: OpenRun, num_usable: int) -> Evidence:
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
    _require_same_prompts(meeting.overlap, where, num_usable)
    return Evidence(
        pair=meeting.second,
        num_sampled=sample.num_sampled,
        baseline=meeting.first,
        comparison="paired" if meeting.overlap.is_paired else "two-sample",
        gaps=_gaps_of(sample, old),
    )


def _gaps_of(*samples: Sample) -> tuple[Gaps, ...]:
    return tuple(sample.data.gaps for sample in samples if sample.data.gaps is not None)


def _require_same_prompts(overlap: Overlap, where: str, num_usable: int) -> None:
    if not overlap.prompts:
        raise UsageError(
            f"{where} shares no prompt with the run's {num_usable} responses; make it from the same prompts"
        )
    if overlap.changed_prompts:
        raise UsageError(
            f"{overlap.changed_prompts} of {overlap.prompts} prompts have other token ids in {where} (another "
            "tokenizer, template or seed): the two are not comparable; make the baseline again on purpose"
        )


def _require_another_run(run: OpenRun, baseline: OpenRun) -> None:
    """Require a baseline that is not the run itself or a copy of it: that could show no change."""
    identities = [(side.manifest.created_at, side.manifest.command) for side in (run, baseline)]
    if identities[0] == identities[1]:
        raise UsageError(
            f"the baseline {baseline.path} is the run itself, or a copy of it: nothing can have changed; "
            "give the run that was kept from before"
        )


def check_comparable(run: OpenRun, baseline: OpenRun) -> None:
    """Require the same checkpoint and the same sampling settings.

    Raises:
        UsageError: the checkpoint or a sampling setting differs.
    """
    old, new = baseline.manifest, run.manifest
    check_same_model(run.identity, baseline.identity, f"the baseline {baseline.path}")
    for name in _SAME_SAMPLING:
        old_value, new_value = getattr(old.settings.sampling, name), getattr(new.settings.sampling, name)
        if old_value != new_value:
            raise UsageError(
                f"the baseline {baseline.path} was sampled with {name} = {old_value}, the run with {new_value}: "
                "give a baseline with the same sampling"
            )


def _num_expected(run: RunDirectory, manifest: Manifest) -> int:
    """The number of responses of each sampler: the imported ones of a log, else as many as were to be sampled."""
    if manifest.log is not None:
        return manifest.log.analysed_responses
    num_prompts: int = read_prompts(run, manifest.run_key, ["prompt_id"]).num_rows
    return num_prompts * manifest.settings.sampling.samples_per_prompt


def write_floor(path: Path, floor: NoiseFloor) -> None:
    write_document(path, floor)


def read_floor(path: Path) -> NoiseFloor:
    """Read the measured floor."""
    return read_document(
        path,
        NoiseFloor,
        missing="the gate file names it as floor; make it with gate calibrate, or take floor out",
        fix="make it again with gate calibrate",
    )


def check_above_floor(gate: GateFile, floor: NoiseFloor, run: OpenRun) -> None:
    """Require that no limit is below the deviation that an unchanged set-up shows.

    Raises:
        UsageError: a limit is below it, or the floor was measured on another model or without this check.
    """
    if floor.model_fingerprint != run.manifest.model.fingerprint:
        raise UsageError("the floor was measured on another model; measure it again with gate calibrate")
    entry_of = {(entry.pair, entry.measured): entry for entry in floor.entries}
    for check in checks_with_floor(gate):
        for name in [check.slice.pair] if check.slice.pair else run.samples:
            entry = entry_of.get((pair_text(name), check.subject))
            if entry is None:
                raise UsageError(
                    f"the floor of {check.subject} was never measured for {pair_text(name)}; calibrate again"
                )
            least = entry.change if check.kind == "max_regression" else entry.same_leg
            if least is None and check.kind == "max_regression":
                raise UsageError(
                    f"the floor of {check} was measured from one run, which shows no change; give gate calibrate two"
                )
            if least is not None and not _is_above_floor(check, least):
                raise UsageError(
                    f"the check {check} on {entry.pair} is below the noise floor: an unchanged set-up shows "
                    f"{least:.3g}; move the limit past that, or calibrate with more sequences"
                )


def _is_above_floor(check: Check, least: float) -> bool:
    return check.limit > least if check.upper else check.limit < least


def checks_with_floor(gate: GateFile) -> list[Check]:
    """The checks whose metric is positive by nature and judged with an interval."""
    return [check for check in gate.checks if check.is_statistical and has_regression(check.name)]


_SAME_LEG = ("pi_again", "pi_other_batch")
