"""The experts that a log records, compared with those that the checkpoint's own routers take on the same ids."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.passes import LoadedWeights
from mismatch_probe.logs.choices import are_recorded, rows_of_predictors
from mismatch_probe.records.findings import ExpertAgreement
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import IntArray, LoggedResponse, TokenSequence
from mismatch_probe.stats.sequences import Ints
from mismatch_probe.training_path.inside.recording import record_routing

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
