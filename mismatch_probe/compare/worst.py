"""The worst tokens of a pair, and the departure of each logged side from the reference."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.config.comparison import CompareSettings, PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import ResponseTokens, TokenInContext
from mismatch_probe.stats.results import Estimate, FewTokens
from mismatch_probe.stats.sequences import Floats, Reals, TokenPair, difference
from mismatch_probe.stats.worst_responses import WorstResponse, few_tokens, worst_responses, worst_tokens
from mismatch_probe.verdict.departures import Departures, apart_floors, floors_of
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.profile import Disagreement

WORST_TOKENS: Final = 20
CONTEXT_TOKENS: Final = 24
WORST_RESPONSES: Final = 5
RESPONSE_TOKENS: Final = 256
"""A longer response is recorded as so many tokens around its worst one."""
PROMPT_CHARACTERS: Final = 2000
"""The number of last characters that are recorded of a longer prompt."""
LEAST_NATS: Final = 0.01
"""Responses without a token that differs by so much are not shown."""
_DIGITS = 9
"""The significant digits of float32."""


def worst_in_context(data: PairData) -> list[TokenInContext]:
    """The tokens of the largest abs(d), largest first; none where no response is usable."""
    if data.pair is None:
        return []
    tokens = []
    for worst in worst_tokens(data.pair, WORST_TOKENS):
        row = int(data.rows[worst.row])
        texts = data.rollouts["token_texts"][row].as_py()
        position = data.position_in_response(worst.row, worst.position)
        tokens.append(
            TokenInContext(
                sequence_id=data.rollouts["id"][row].as_py(),
                position=position,
                before="".join(texts[max(0, position - CONTEXT_TOKENS) : position]),
                token=texts[position],
                after="".join(texts[position + 1 : position + 1 + CONTEXT_TOKENS]),
                log_pi=worst.log_pi,
                log_mu=worst.log_mu,
                log_ref=worst.log_ref,
            )
        )
    return tokens


def few_tokens_of(data: PairData) -> FewTokens | None:
    """The few tokens that contribute half of the KL, if few do; a response of a log has the name of the log."""
    if data.pair is None:
        return None
    names = data.rollouts["where" if "where" in data.rollouts.column_names else "id"]

    def place(row: int, position: int) -> tuple[str, int]:
        return names[int(data.rows[row])].as_py(), data.position_in_response(row, position)

    return few_tokens(data.pair, place)


def worst_with_tokens(data: PairData, prompt_texts: Mapping[str, str]) -> list[ResponseTokens]:
    """The responses that deviate most, with the log-probs of their tokens; none where no response is usable.

    prompt_texts: the texts by prompt id.
    """
    if data.pair is None:
        return []
    worst = worst_responses(data.pair, WORST_RESPONSES)
    return [
        _response_with_tokens(data, data.pair, each, prompt_texts)
        for each in worst
        if each.largest_abs_diff >= LEAST_NATS
    ]


def _response_with_tokens(
    data: PairData, pair: TokenPair, worst: WorstResponse, prompt_texts: Mapping[str, str]
) -> ResponseTokens:
    row = int(data.rows[worst.row])
    texts: list[str] = data.rollouts["token_texts"][row].as_py()
    positions = data.measured_positions(worst.row)
    first = max(0, min(int(positions[worst.worst]) - RESPONSE_TOKENS // 2, len(texts) - RESPONSE_TOKENS))
    window = slice(first, first + RESPONSE_TOKENS)
    of_response = slice(*pair.sequences.offsets[worst.row : worst.row + 2])
    log_pi, log_mu = (_values_at(positions, leg[of_response], len(texts))[window] for leg in (pair.log_pi, pair.log_mu))
    return ResponseTokens(
        sequence_id=data.rollouts["id"][row].as_py(),
        prompt=prompt_texts.get(data.rollouts["prompt_id"][row].as_py(), "")[-PROMPT_CHARACTERS:] or None,
        num_tokens=worst.num_tokens,
        log_weight=worst.log_weight,
        mean_abs_diff=worst.mean_abs_diff,
        largest_abs_diff=worst.largest_abs_diff,
        kl_k3=worst.kl_k3,
        first=first,
        tokens=texts[window],
        log_pi=log_pi,
        log_mu=log_mu,
    )


def _values_at(positions: npt.NDArray[np.int64], values: Reals, length: int) -> list[float | None]:
    """The values at their positions of the response [`length`], None between them."""
    spread: list[float | None] = [None] * length
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        spread[position] = float(f"{value:.{_DIGITS}g}")
    return spread


_LOGGED: Final = {"pi": "log_pi", "mu": "log_mu"}


def departures(
    settings: CompareSettings,
    name: PairName,
    data: Mapping[PairName, PairData],
    deviations: Mapping[PairName, Disagreement],
) -> Departures | None:
    """The departures of the logged sides; None where the pair has no logged sampler or no reference."""
    pi, mu = settings.pi(name[0]), settings.mu(name[1])
    if not mu.logged or data[name].pair is None:
        return None
    logged_pair = next((pair for pair in settings.pairs if settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    pair_name = next((pair for pair in settings.pairs if not settings.pi(pair[0]).logged and pair[1] == name[1]), None)
    if pair_name is not None:
        return _departures_from_checkpoint(settings, name, pair_name, logged_pair, data, deviations)
    pair = data[name].pair
    return (
        None if pair is None or pair.log_ref is None else _departures_from_each_other(pair, pi, mu, settings.confidence)
    )


def _departures_from_checkpoint(
    settings: CompareSettings,
    name: PairName,
    pair_name: PairName,
    logged_pair: PairName | None,
    data: Mapping[PairName, PairData],
    deviations: Mapping[PairName, Disagreement],
) -> Departures | None:
    """The departures in units of the error of the training path; the trainer's side only where the log has one."""
    ours, level = data[pair_name].pair, settings.confidence
    if ours is None or ours.log_ref is None:
        return None
    pi, mu = settings.pi(pair_name[0]), settings.mu(pair_name[1])
    distance = difference(ours.log_pi, ours.log_ref), pi.dtype
    dtypes = {"mu": mu.dtype}
    floors = {
        "mu": floors_of(difference(ours.log_mu, ours.log_ref), ours.log_ref, distance, mu.dtype, ours.sequences, level)
    }
    departure = None
    theirs = None if logged_pair is None else data[logged_pair].pair
    if logged_pair is not None and theirs is not None and theirs.log_ref is not None:
        if theirs.log_ref.shape != ours.log_ref.shape:
            return None
        dtypes["pi"] = settings.pi(logged_pair[0]).dtype
        error = difference(theirs.log_pi, theirs.log_ref)
        floors["pi"] = floors_of(error, theirs.log_ref, distance, dtypes["pi"], theirs.sequences, level)
        departure = apart_floors(
            theirs.log_pi, theirs.log_mu, theirs.log_ref, distance, dtypes, theirs.sequences, level
        )
    has_signature = bool(signatures(deviations[pair_name]))
    sides = ("pi", "mu") if name == logged_pair else ("mu",)
    return Departures(sides, _available_floors(floors), dtypes, departure, from_checkpoint=True, is_named=has_signature)


def _departures_from_each_other(pair: TokenPair, pi: Side, mu: Side, level: float) -> Departures:
    """The departures of each side, in units of the error of the other side."""
    assert pair.log_ref is not None
    errors: dict[str, Floats] = {
        side: difference(getattr(pair, column), pair.log_ref) for side, column in _LOGGED.items()
    }
    dtypes: dict[str, Dtype] = {"pi": pi.dtype, "mu": mu.dtype}
    others = {"pi": "mu", "mu": "pi"}
    floors = {
        side: floors_of(errors[side], pair.log_ref, (errors[other], dtypes[other]), dtypes[side], pair.sequences, level)
        for side, other in others.items()
    }
    return Departures(("pi", "mu"), _available_floors(floors), dtypes, None, from_checkpoint=False)


def _available_floors(floors: dict[str, Estimate | None]) -> dict[str, Estimate]:
    return {side: estimate for side, estimate in floors.items() if estimate is not None}
