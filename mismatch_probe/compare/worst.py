"""The worst tokens and responses of a pair, as text with its log-probs."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.records.summary import ResponseTokens, TokenInContext
from mismatch_probe.stats.few_tokens import few_tokens
from mismatch_probe.stats.figures import worst_tokens
from mismatch_probe.stats.results import FewTokens
from mismatch_probe.stats.sequences import Reals, TokenPair
from mismatch_probe.stats.worst_responses import WorstResponse, worst_responses

WORST_TOKENS: Final = 20
CONTEXT_TOKENS: Final = 24
WORST_RESPONSES: Final = 5
RESPONSE_TOKENS: Final = 256
"""A longer response is recorded as so many tokens around its worst one."""
PROMPT_CHARACTERS: Final = 2000
"""Of a longer prompt so many of its last characters are recorded."""
LEAST_NATS: Final = 0.01
"""Of responses without a token that differs by so much there is nothing to look at."""
_DIGITS = 9
"""What float32 holds."""


def worst_in_context(data: PairData) -> list[TokenInContext]:
    """The tokens of largest abs(d), largest first; none where nothing was usable."""
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
    """The few tokens that hold half of the KL, if few do; a response is called as its log has it where it is of one."""
    if data.pair is None:
        return None
    names = data.rollouts["where" if "where" in data.rollouts.column_names else "id"]

    def place(row: int, position: int) -> tuple[str, int]:
        return names[int(data.rows[row])].as_py(), data.position_in_response(row, position)

    return few_tokens(data.pair, place)


def worst_with_tokens(data: PairData, prompt_texts: Mapping[str, str]) -> list[ResponseTokens]:
    """The responses that deviate most, with the log-probs of their tokens; none where nothing was usable.

    prompt_texts: by prompt id.
    """
    if data.pair is None:
        return []
    worst = worst_responses(data.pair, WORST_RESPONSES)
    return [_with_tokens(data, data.pair, each, prompt_texts) for each in worst if each.largest_abs_diff >= LEAST_NATS]


def _with_tokens(
    data: PairData, pair: TokenPair, worst: WorstResponse, prompt_texts: Mapping[str, str]
) -> ResponseTokens:
    row = int(data.rows[worst.row])
    texts: list[str] = data.rollouts["token_texts"][row].as_py()
    measured = data.measured_positions(worst.row)
    first = max(0, min(int(measured[worst.worst]) - RESPONSE_TOKENS // 2, len(texts) - RESPONSE_TOKENS))
    shown = slice(first, first + RESPONSE_TOKENS)
    of_response = slice(*pair.sequences.offsets[worst.row : worst.row + 2])
    log_pi, log_mu = (_at(measured, leg[of_response], len(texts))[shown] for leg in (pair.log_pi, pair.log_mu))
    return ResponseTokens(
        sequence_id=data.rollouts["id"][row].as_py(),
        prompt=prompt_texts.get(data.rollouts["prompt_id"][row].as_py(), "")[-PROMPT_CHARACTERS:] or None,
        num_tokens=worst.num_tokens,
        log_weight=worst.log_weight,
        mean_abs_diff=worst.mean_abs_diff,
        largest_abs_diff=worst.largest_abs_diff,
        kl_k3=worst.kl_k3,
        first=first,
        tokens=texts[shown],
        log_pi=log_pi,
        log_mu=log_mu,
    )


def _at(measured: npt.NDArray[np.int64], values: Reals, length: int) -> list[float | None]:
    """The values at their positions of the response [`length`], None between them."""
    spread: list[float | None] = [None] * length
    for position, value in zip(measured.tolist(), values.tolist(), strict=True):
        spread[position] = float(f"{value:.{_DIGITS}g}")
    return spread
