"""From run directories to evidence: the run, sound, and beside it a baseline that it may be compared with."""

from dataclasses import dataclass
from pathlib import Path

from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import Overlap, Sample, by_prefill, meet, pair_text, read_samples
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.gate.identity import Identity, check_same_model
from mismatch_probe.gate.measure import Evidence
from mismatch_probe.gate.soundness import check_complete, check_finished, sound_pair
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from mismatch_probe.stats.left_out import Gaps

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
    num_prompts: int = read_table(run.prompts_path, ["prompt_id"]).num_rows
    return num_prompts * manifest.settings.sampling.samples_per_prompt
