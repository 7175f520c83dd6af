"""What the parts of responses say: how many changed their weights, where, and whether the log's versions agree."""

from collections.abc import Sequence
from typing import Final

from mismatch_probe.config.model import KnownWeights
from mismatch_probe.explain.hypotheses import recorded_ends
from mismatch_probe.explain.judging import Floats
from mismatch_probe.explain.parts import PartsFit, PartsPlan, change_price, loss_of, recorded_plan
from mismatch_probe.explain.search import REACHES_FLOORS, SideBench
from mismatch_probe.notation import write_share
from mismatch_probe.records.findings import PartsOfResponse, PartsReading, VersionPart

_MOST_NAMED: Final = 32


def read_parts(bench: SideBench, fit: PartsFit | None) -> PartsReading | None:
    """What the parts are and whether the log's own versions agree; None where the given weights do not fit the side, so
    that no part can be believed.
    """
    if fit is None:
        return None
    tokens = bench.tokens
    if not bench.judge.is_counted.any() or fit.floors > REACHES_FLOORS:
        return None
    numbers = {each: number for number, each in enumerate(fit.candidates)}
    names = [_name(each) for each in fit.candidates]
    responses, kinds, num_recorded = [], dict.fromkeys(KINDS, 0), 0
    for row, plan in enumerate(fit.plans):
        misfit = ""
        response = tokens.responses[row]
        if response.weight_version is not None:
            num_recorded += 1
            record = recorded_plan(bench.weights, row, numbers, int(tokens.lengths[row]))
            losses = fit.losses[:, tokens.of_row(row)]
            if record is not None and not _is_range(response.weight_version, plan, names):
                misfit = _misfit(losses, plan, record)
            if misfit:
                kinds[misfit] += 1
        if len(plan) > 1 or misfit:
            parts = [VersionPart(version=names[weights], end=end) for weights, end in plan]
            intervals = [list(interval) for interval in fit.intervals[row]]
            version_text = response.weight_version or ""
            responses.append(
                PartsOfResponse(
                    where=response.where, parts=parts, intervals=intervals, recorded_version=version_text, misfit=misfit
                )
            )
    return PartsReading(
        versions=names,
        num_responses=tokens.num_responses,
        num_mixed=fit.num_mixed,
        num_recorded=num_recorded,
        num_misfits=sum(kinds.values()),
        misfits={kind: count for kind, count in kinds.items() if count},
        keeps_cache=fit.keeps_cache,
        responses=responses[:_MOST_NAMED],
    )


KINDS: Final = ("completion", "dispatch", "boundary", "other")
"""How a record departs: it has the last version for all, the first one, another place of the change, or other ones."""


def _misfit(losses: Floats, plan: PartsPlan, record: PartsPlan) -> str:
    """Which of KINDS; empty where the record explains the response about as well as its parts do."""
    if loss_of(losses, record) - loss_of(losses, plan) < change_price(losses.shape[1]):
        return ""
    versions = [weights for weights, _ in plan]
    if len(plan) > 1 and [weights for weights, _ in record] == versions:
        return "boundary"
    if len(plan) > 1 and len(record) == 1 and record[0][0] in (versions[0], versions[-1]):
        return "completion" if record[0][0] == versions[-1] else "dispatch"
    return "other"


def _is_range(version: str, plan: PartsPlan, names: Sequence[str]) -> bool:
    """Whether a record without places, `FIRST-LAST`, names the weights that the parts have."""
    ends = recorded_ends(version)
    return ends is not None and (names[plan[0][0]], names[plan[-1][0]]) == ends


def _name(weights: KnownWeights | None) -> str:
    return "the checkpoint" if weights is None else weights.version


_MISFITS: Final = {
    "completion": "names the last version for all of it, as a stamp at completion does",
    "dispatch": "names the first version for all of it, as a stamp at dispatch does",
    "boundary": "has the change at another token",
    "other": "names other weights",
}


def parts_sentences(reading: PartsReading) -> list[str]:
    """How many responses changed, an example with its interval, and how many records do not fit."""
    lines = []
    if reading.num_mixed:
        share = write_share(reading.num_mixed, reading.num_responses)
        lines.append(f"{reading.num_mixed} of {reading.num_responses} responses ({share}) fit several versions in turn")
    mixed_responses = [response for response in reading.responses if len(response.parts) > 1]
    lines += [_example(response) for response in mixed_responses[:1]]
    if reading.keeps_cache:
        lines.append("later parts fit better behind the keys and values that the older weights computed")
    for kind, count in reading.misfits.items():
        lines.append(f"the log's version does not fit {count} of {reading.num_recorded} responses: it {_MISFITS[kind]}")
    if reading.num_mixed and reading.num_recorded and not reading.num_misfits:
        lines.append(f"the versions that the log names fit all {reading.num_recorded} responses")
    return lines


def _example(response: PartsOfResponse) -> str:
    """`line 3: weights of 7 up to token 12 (11 to 14), then 8`."""
    first, *later_parts = response.parts
    words = f"{response.where}: weights of {first.version}"
    ends = [first.end, *(part.end for part in later_parts)]
    for end, (start, last), part in zip(ends, response.intervals, later_parts, strict=False):
        words += f" up to token {end} ({start} to {last}), then {part.version}"
    return words
