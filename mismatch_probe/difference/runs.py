"""Two run directories set side by side, and what changed between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from mismatch_probe import __version__
from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.comparison import PairName
from mismatch_probe.difference.samples import (
    Meeting,
    Sample,
    by_prefill,
    meet,
    pair_text,
    read_samples,
    side_against_itself,
)
from mismatch_probe.difference.versus import (
    NumberRange,
    TracingEstimator,
    part_of,
    second_minus_first,
    second_over_first,
    traced_metrics,
    without_trace,
)
from mismatch_probe.errors import BrokenRecord, UsageError
from mismatch_probe.notation import write_estimate
from mismatch_probe.provenance.environment import CPU_INSTRUCTIONS
from mismatch_probe.reading import Unreadable, differences, parse_json
from mismatch_probe.records.answers import (
    APPLIED,
    BinDifference,
    Change,
    Difference,
    DifferenceSide,
    MetricDifference,
    PairDifference,
)
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.stats.bins import log_ends
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.headline import measures_precision
from mismatch_probe.verdict.preflight.facts import AGREEMENT

HEADLINE = "abs_logprob_diff"


def difference_of(
    first: RunDirectory, second: RunDirectory, *, rescored_with: RunDirectory | None = None
) -> Difference:
    """Every pair of dtypes that both runs have; where they share none and each has one, those two.

    rescored_with: the run whose settings scored the first run's responses in the second. Its engine scored them by
    prefill alone, so it is compared with the first run's prefill.

    Raises:
        BrokenRecord: a run is damaged, or has no usable response.
        UsageError: no pair of one run has a counterpart in the other, or the first lacks the prefill.
    """
    old, new = first.read_manifest(), second.read_manifest()
    old_samples, new_samples = read_samples(first, old), read_samples(second, new)
    if rescored_with is not None:
        old_samples = {name: by_prefill(sample) for name, sample in old_samples.items()}
    matches = _match(old_samples, new_samples)
    level = old.settings.confidence
    return Difference(
        tool_version=__version__,
        first=_side(first, old),
        second=_side(second, new),
        rescored_with=None if rescored_with is None else str(rescored_with.path),
        changes=changes(old, new),
        pairs=[
            _pair(
                _usable(old_samples[a], first),
                _usable(new_samples[b], second),
                level,
                "; ".join((*_faults("first", first, old_samples[a]), *_faults("second", second, new_samples[b]))),
                [*_rounding_notes("first", first, a), *_rounding_notes("second", second, b)],
            )
            for a, b in matches
        ],
        only_first=[pair_text(name) for name in old_samples if name not in {a for a, _ in matches}],
        only_second=[pair_text(name) for name in new_samples if name not in {b for _, b in matches}],
    )


def _match(first: dict[PairName, Sample], second: dict[PairName, Sample]) -> list[tuple[PairName, PairName]]:
    pairs_of_both = [(name, name) for name in first if name in second]
    if pairs_of_both:
        return pairs_of_both
    if len(first) == len(second) == 1:
        return [(next(iter(first)), next(iter(second)))]
    raise UsageError(
        f"the runs have no pair of dtypes in common: {', '.join(map(pair_text, first))} against "
        f"{', '.join(map(pair_text, second))}; compare with the same --dtype, or with one dtype each"
    )


def _usable(sample: Sample, run: RunDirectory) -> Sample:
    if sample.data.pair is None:
        raise BrokenRecord(
            f"{pair_text(sample.name)} of {run.path} has no usable response: there is nothing to compare"
        )
    return sample


def _pair_summaries(run: RunDirectory) -> dict[PairName, PairSummary]:
    pairs = run.read_summary().pairs if run.summary_path.exists() else []
    return {(pair.train, pair.infer): pair for pair in pairs}


def ill_conditioned_pairs(run: RunDirectory) -> dict[PairName, str]:
    """How far FP32 itself is from FP64, in a clause, for each pair of whose checkpoint that was measured to be far."""
    return {
        name: f"FP32 itself is {write_estimate(pair.conditioning.error_fp32).value} nats a token from FP64"
        for name, pair in _pair_summaries(run).items()
        if pair.conditioning is not None and pair.verdict.code == Code.ILL_CONDITIONED
    }


def _rounding_notes(which: str, run: RunDirectory, name: PairName) -> list[str]:
    clause = ill_conditioned_pairs(run).get(name)
    return [] if clause is None else [f"{clause} on the checkpoint of the {which} run"]


def _faults(which: str, run: RunDirectory, sample: Sample) -> Iterator[str]:
    """Why a pair's numbers are no measure of precision: what its data lacks, or what its run's summary says of it."""
    summary = _pair_summaries(run).get(sample.name)
    verdict = None if summary is None else summary.verdict
    if sample.data.counts.has_faults:
        yield f"the data of the {which} run is broken"
    elif verdict is not None and not measures_precision(verdict):
        yield f"the {which} run is {'a bug' if verdict.kind == 'bug' else 'broken'} ({verdict.code.replace('_', ' ')})"


def _side(run: RunDirectory, manifest: Manifest) -> DifferenceSide:
    return DifferenceSide(
        run=str(run.path),
        model=manifest.model.name,
        model_fingerprint=manifest.model.fingerprint,
        created_at=manifest.created_at,
        tool_version=manifest.tool_version,
    )


def _pair(first: Sample, second: Sample, level: float, no_ratio: str, notes: Sequence[str]) -> PairDifference:
    meeting = meet(first, second)
    old, _ = traced_metrics(meeting.first, level)
    new, _ = traced_metrics(meeting.second, level)

    def against(estimate: Estimate, other: Estimate) -> MetricDifference:
        return MetricDifference(
            first=without_trace(estimate),
            second=without_trace(other),
            difference=second_minus_first(estimate, other, level),
            ratio=None if no_ratio else second_over_first(estimate, other, level),
        )

    metrics = {name: against(old[name], new[name]) for name in old if name in new}
    return PairDifference(
        first_pair=pair_text(first.name),
        second_pair=pair_text(second.name),
        comparison="paired" if meeting.overlap.is_paired else "two-sample",
        shared_prompts=meeting.overlap.prompts,
        shared_responses=meeting.overlap.responses,
        same_responses=meeting.overlap.same_responses,
        first_counts=first.data.counts,
        second_counts=second.data.counts,
        sentence="; ".join((_sentence(metrics[HEADLINE], no_ratio), *notes)),
        no_ratio=no_ratio,
        moved=_moves(first, second, level),
        metrics=metrics,
        by_position=list(_bins(meeting, 0, lambda pair, span: part_of(pair, position=span), against, level)),
        by_response_length=list(_bins(meeting, 1, lambda pair, span: part_of(pair, length=span), against, level)),
    )


def _moves(first: Sample, second: Sample, level: float) -> dict[str, Estimate]:
    deviations = {side: _mean_deviation(pair, level) for side, pair in side_against_itself(first, second).items()}
    return {side: without_trace(estimate) for side, estimate in deviations.items() if estimate is not None}


def _bins(
    meeting: Meeting,
    start: int,
    part: Callable[[TokenPair, NumberRange], TokenPair | None],
    against: Callable[[Estimate, Estimate], MetricDifference],
    level: float,
) -> Iterator[BinDifference]:
    """Ranges that double, from `start` on."""
    longest = max(int(pair.sequences.lengths.max()) for pair in (meeting.first, meeting.second))
    for span in pairwise(end + start for end in (0, *log_ends(longest, per_octave=1))):
        old, new = (_mean_deviation(part(pair, span), level) for pair in (meeting.first, meeting.second))
        if old is not None and new is not None:
            yield BinDifference(low=span[0], high=span[1], abs_logprob_diff=against(old, new))


def _mean_deviation(pair: TokenPair | None, level: float) -> Estimate | None:
    if pair is None:
        return None
    return TracingEstimator(pair.sequences, level).mean(pair.abs_diff, "token", Scale.POSITIVE)


def _sentence(move: MetricDifference, no_ratio: str) -> str:
    what = "the mean deviation of a token, abs(d),"
    if no_ratio:
        values = f"{move.first.value:.3g} nats in the first run and {move.second.value:.3g} in the second"
        return f"no ratio, because {no_ratio}; {what} is {values}"
    if move.ratio is None or move.ratio.low is None or move.ratio.high is None:
        return f"{what} is {move.first.value:.3g} nats in the first run and {move.second.value:.3g} in the second"
    if move.ratio.low == move.ratio.high == 1:
        return f"no difference can be seen in {what.removesuffix(',')}: it is {move.first.value:.3g} nats in both runs"
    times = f"{move.ratio.value:.3g} times the first run's [{move.ratio.low:.3g}, {move.ratio.high:.3g}]"
    if move.ratio.low <= 1 <= move.ratio.high:
        return f"no difference can be seen in {what.removesuffix(',')}: it is {times}"
    return f"the second run is {'worse' if move.ratio.value > 1 else 'better'}: {what} is {times}"


_ABSENT = "absent"
_NAMES: Final = {"True": "true", "False": "false", "None": "none"}
_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


def changes(first: Manifest, second: Manifest) -> list[Change]:
    """Everything that differs between two manifests and may change a number; where and when they were made may not."""
    return [
        Change(kind=kind, name=name, first=texts[0], second=texts[1])
        for kind, first_table, second_table in _parts(first, second)
        for name, old, new in differences(first_table, second_table, _ABSENT)
        for texts in [_texts(old, new)]
    ]


def version_changes(first: Manifest, second: Manifest) -> list[Change]:
    return [change for change in changes(first, second) if change.kind == "versions"]


def _parts(first: Manifest, second: Manifest) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    yield "versions", first.versions, second.versions
    yield "settings", _settings(first), _settings(second)
    model = {"fingerprint", "architecture", "checkpoint_dtype"}
    yield "model", first.model.model_dump(include=model), second.model.model_dump(include=model)
    yield "hardware", *_hardware(first, second)
    yield "git", first.git or {}, second.git or {}
    stages = sorted(first.stages.keys() & second.stages.keys())
    yield (
        APPLIED,
        {name: _read_back(first, name) for name in stages},
        {name: _read_back(second, name) for name in stages},
    )


def _hardware(first: Manifest, second: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """That of both; earlier versions did not record the instruction sets."""
    tables = dict(first.hardware), dict(second.hardware)
    if not all(CPU_INSTRUCTIONS in table for table in tables):
        for table in tables:
            table.pop(CPU_INSTRUCTIONS, None)
    return tables


def _read_back(manifest: Manifest, stage: str) -> dict[str, Any]:
    """The effective settings of a stage; how far a reference is from itself is a measurement on a run's own tokens."""
    return {name: value for name, value in manifest.stages[stage].effective_settings.items() if name != AGREEMENT}


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Sides by name, with what they were given. Earlier runs kept the text of a flag where a file gives a number: each
    argument as the value it spells.
    """
    settings = manifest.settings.model_dump(mode="json")
    args = settings["engine"]["args"]
    engine = settings["engine"] | {"args": {name: _spell(args[name]) for name in args}}
    sides = {role: {side["name"]: _own_settings(side) for side in settings[role]} for role in ("train", "infer")}
    return settings | {"engine": engine, "pairs": ", ".join(map("/".join, settings["pairs"]))} | sides


def _own_settings(side: Mapping[str, Any]) -> dict[str, Any]:
    """What a side declares besides its name."""
    unsaid = {"name": side["name"], "logged": False, "args": {}}
    return {name: value for name, value in side.items() if value is not None and value != unsaid.get(name)}


def _spell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _WORDS[value.lower()] if value.lower() in _WORDS else parse_json(value)
    except Unreadable:
        return value


def _texts(first: Any, second: Any) -> tuple[str, str]:
    """Both as a file of settings writes them; in quotes where they are empty, or read alike otherwise."""
    old, new = (
        value if isinstance(value, str) and value else _NAMES.get(repr(value), repr(value)) for value in (first, second)
    )
    return (repr(first), repr(second)) if old == new else (old, new)
