"""Measuring the noise floor from runs of one unchanged set-up."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from mismatch_probe.difference.samples import Sample, meet, pair_text, side_against_itself
from mismatch_probe.difference.versus import part_of, traced_metrics
from mismatch_probe.errors import UsageError
from mismatch_probe.gate.claims import regression
from mismatch_probe.gate.config import Check, GateFile
from mismatch_probe.gate.measure import sound_pair
from mismatch_probe.gate.reading import OpenRun, check_comparable, checks_with_floor
from mismatch_probe.records.gate_result import Floor, FloorEntry
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair

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
