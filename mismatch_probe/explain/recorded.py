"""What a log records besides log-probs, held against the checkpoint.

The versions of the weights: how many parts of a response changed them, where, and whether the log agrees. The experts:
those that the log records, compared with those that the checkpoint's own routers take on the same ids.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mismatch_probe.config.model import KnownWeights
from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.explain.hypotheses import recorded_ends
from mismatch_probe.explain.judging import Floats, LoggedTokens
from mismatch_probe.explain.parts import PartsFit, PartsPlan, change_price, loss_of, recorded_plan
from mismatch_probe.explain.passes import LoadedWeights
from mismatch_probe.explain.search import REACHES_FLOORS, SideBench
from mismatch_probe.logs.choices import are_recorded, rows_of_predictors
from mismatch_probe.notation import write_share
from mismatch_probe.records.findings import ExpertAgreement, PartsOfResponse, PartsReading, VersionPart
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import IntArray, LoggedResponse, TokenSequence
from mismatch_probe.stats.sequences import Ints
from mismatch_probe.training_path.inside.recording import record_routing

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


_MOST_RESPONSES: Final = 16
_LAYER_SHIFTS: Final = range(-4, 5)
_TOKEN_SHIFTS: Final = range(-2, 3)
_LEAST_GAIN: Final = 0.2
"""Of the share of equal choices: a shift is named where it explains so much more."""


def agreement_of_experts(weights: LoadedWeights, tokens: LoggedTokens) -> ExpertAgreement | None:
    """None where the log records no experts of these responses, or the model has none that can be read."""
    rows = [row for row, response in enumerate(tokens.responses) if _is_usable(response)][:_MOST_RESPONSES]
    if not rows:
        return None
    try:
        own = list(_own_routing(weights, [tokens.sequences[row] for row in rows]))
    except RoutingUnseen:
        return None
    responses = [tokens.responses[row] for row in rows]
    layers = own[0].layers
    num_columns = responses[0].experts.shape[1] if responses[0].experts is not None else 0
    columns = np.asarray(layers if num_columns > len(layers) and num_columns > layers[-1] else range(len(layers)))
    shares: dict[tuple[int, int], float] = {}
    counts: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    for by_layers in _LAYER_SHIFTS:
        for by_tokens in _TOKEN_SHIFTS:
            equal: Ints = np.zeros(len(layers), np.int64)
            total: Ints = np.zeros(len(layers), np.int64)
            for response, choice in zip(responses, own, strict=True):
                alike, is_there = _alike(response, choice, columns + by_layers, by_tokens)
                equal, total = equal + alike, total + is_there
            if total.sum():
                counts[by_layers, by_tokens] = equal, total
                shares[by_layers, by_tokens] = float(equal.sum() / total.sum())
    if not shares:
        return None
    shares.setdefault((0, 0), 0.0)
    best = max(shares, key=lambda shift: (shares[shift], shift == (0, 0)))
    is_shifted = best != (0, 0) and shares[best] >= shares[0, 0] + _LEAST_GAIN
    equal, total = counts[(0, 0) if (0, 0) in counts else best]
    return ExpertAgreement(
        num_responses=len(rows),
        num_places=int(total.sum()),
        agreement=shares[0, 0],
        by_layer={
            str(layer): float(equal[number] / total[number])
            for number, layer in enumerate(layers)
            if total[number] and (0, 0) in counts
        },
        layer_shift=best[0] if is_shifted else 0,
        token_shift=best[1] if is_shifted else 0,
        agreement_shifted=shares[best] if is_shifted else None,
    )


def _is_usable(response: LoggedResponse) -> bool:
    if response.experts is None or not response.sampled.any():
        return False
    return rows_of_predictors(response)[1]


def _own_routing(weights: LoadedWeights, sequences: Sequence[TokenSequence]) -> Iterator[SequenceRouting]:
    with weights.arithmetic.active():
        for sequence in sequences:
            yield from record_routing(weights.model, [sequence])


def _alike(response: LoggedResponse, own: SequenceRouting, columns: Ints, by_tokens: int) -> tuple[Ints, Ints]:
    """Of the places of each layer [L]: how many have the same experts on both sides, and how many are on both.

    columns: where each layer stands in the log. by_tokens: how far behind its own token a logged row stands.
    """
    assert response.experts is not None
    own_rows, _ = rows_of_predictors(response)
    positions = np.flatnonzero(response.sampled) + response.prompt_token_ids.size - 1
    rows = own_rows + by_tokens
    is_row = (rows >= 0) & (rows < len(response.experts)) & (positions < own.experts.shape[1]) & (own_rows >= 0)
    rows, positions = rows[is_row], positions[is_row]
    alike, is_there = np.zeros(len(columns), np.int64), np.zeros(len(columns), np.int64)
    for number, column in enumerate(columns.tolist()):
        if 0 <= column < response.experts.shape[1]:
            logged: IntArray = response.experts[rows, column]
            is_recorded = are_recorded(logged)
            own_rows = own.experts[number, positions]
            if logged.shape != own_rows.shape:
                continue
            is_equal = (np.sort(logged, axis=1) == np.sort(own_rows, axis=1)).all(axis=1)
            alike[number] = int((is_equal & is_recorded).sum())
            is_there[number] = int(is_recorded.sum())
    return alike, is_there
