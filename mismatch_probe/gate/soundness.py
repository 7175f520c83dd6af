"""What must be true of a run before any number of it is held against a limit; each fault is an error, never a pass."""

from collections.abc import Iterable
from pathlib import Path

from mismatch_probe.difference.samples import Sample, pair_text
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.notation import write_many
from mismatch_probe.records.kinds import go_on
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.equal_legs import copy_of, where_equal


def check_finished(manifest: Manifest, path: Path, where: str) -> None:
    """Every stage is done of the run at `path`, which sentences call `where`.

    Raises:
        BrokenRecord: one is not.
    """
    unfinished = [name for name, stage in manifest.stages.items() if stage.state not in ("done", "skipped")]
    if unfinished or not manifest.stages:
        what = f"{', '.join(unfinished)} not done" if unfinished else "it has no stage"
        raise BrokenRecord(f"{where} is unfinished ({what}): {go_on(path)}")


def check_complete(samples: Iterable[Sample], num_expected: int, path: Path, where: str) -> None:
    """Every response that was asked for is there, so that none was left out for what it shows.

    Raises:
        BrokenRecord: some are not.
    """
    for sample in samples:
        if sample.num_sampled not in (0, num_expected):
            raise BrokenRecord(
                f"{pair_text(sample.name)} of {where} has {sample.num_sampled} responses, and {num_expected} were "
                f"asked for: nothing is judged; {go_on(path)}, or make it again"
            )


def sound_pair(sample: Sample, manifest: Manifest, where: str) -> TokenPair:
    """The token pair of a sample that may be judged.

    Raises:
        BrokenRecord: a dtype was not applied, token ids differ, log-probs are not finite or missing, of a log those of
            most tokens, there is no response to compare, or what was seen in a log makes its numbers mean nothing.
    """
    pi, mu = manifest.settings.pi(sample.name[0]), manifest.settings.mu(sample.name[1])
    name = f"{pair_text(sample.name)} of {where}"
    _check_applied(manifest, pi.stage("score"), pi.dtype, f"the training path for {name}")
    _check_applied(manifest, mu.stage("sample"), mu.dtype, f"the engine for {name}")
    counts = sample.data.counts
    in_part = counts.is_measured_in_part
    dropped = 0 if in_part else sample.num_sampled - sample.num_empty - counts.num_sequences
    foreign, void = write_many(counts.mismatched_ids, "response"), write_many(dropped, "response")
    faults = (
        (sample.num_sampled == 0, "holds no response at all"),
        (counts.mismatched_ids, f"has {foreign} scored on other token ids than were sampled"),
        (
            not in_part and counts.missing_mu,
            f"lacks {_log_probs(counts.missing_mu)} of the engine (NaN, or -100 or lower)",
        ),
        (
            not in_part and counts.missing_pi,
            f"lacks {_log_probs(counts.missing_pi)} of the training path (NaN, or -9999)",
        ),
        (counts.nonfinite_mu, f"has {write_many(counts.nonfinite_mu, 'infinite log-prob')} of the engine"),
        (counts.nonfinite_pi, f"has {write_many(counts.nonfinite_pi, 'infinite log-prob')} of the training path"),
        (counts.positive_mu, f"has {_log_probs(counts.positive_mu)} of the engine above 0, and none can be"),
        (counts.positive_pi, f"has {_log_probs(counts.positive_pi)} of the training path above 0, and none can be"),
        (dropped, f"has {void} whose prefill or reference log-probs are missing, not finite or above 0"),
    )
    again = "find the cause and run compare again" if manifest.log is None else "mend the log and import it again"
    for count, what in faults:
        if count:
            raise BrokenRecord(f"{name} {what}: nothing is judged; {again}")
    if pi.logged and mu.logged and (broken := _broken_note(manifest)):
        raise BrokenRecord(f"{name}: {broken}: nothing is judged; {again}")
    if sample.data.pair is None:
        raise BrokenRecord(
            f"{name} has not one response token to compare: nothing is judged; look at the prompts, the chat template "
            "and --max-new-tokens"
        )
    copies = copy_of(sample.data.pair, (pi.dtype, mu.dtype), say_whose_they_are=sample.data.legs_say_whose_they_are)
    if copies is not None:
        raise BrokenRecord(
            f"{name} has the same log-probs on both sides, bit for bit {where_equal(copies)}, and no leg says which "
            "side computed it, so that one may be a copy: nothing is judged; run compare again with this version"
        )
    return sample.data.pair


def _broken_note(manifest: Manifest) -> str | None:
    notes = [] if manifest.log is None else manifest.log.notes
    return next((note.sentence for note in notes if note.level == "broken"), None)


def _check_applied(manifest: Manifest, stage: str, asked: Dtype, side: str) -> None:
    record = manifest.stages.get(stage)
    applied = None if record is None else record.effective_settings.get("dtype")
    if applied != asked:
        raise BrokenRecord(
            f"{side} ran in {applied or 'an unknown dtype'}, not in {asked}: nothing is judged; "
            "find what overrides the dtype (quantisation, the checkpoint's own config)"
        )


def _log_probs(number: int) -> str:
    return write_many(number, "log-prob")
