"""The worst tokens and responses of a pair are told with their text and their place in the whole response."""

import numpy as np
import pyarrow as pa

from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.verdict_input import PROMPT_CHARACTERS, RESPONSE_TOKENS, worst_in_context, worst_with_tokens
from mismatch_probe.records.summary import Counts
from mismatch_probe.stats.sequences import Sequences, TokenPair

LENGTH = 1000


def data_of(diff: np.ndarray, mask: np.ndarray | None = None) -> PairData:
    """One response of LENGTH tokens, of which those under `mask` were sampled, after a row that is not usable."""
    texts = [f"t{number}" for number in range(LENGTH)]
    columns = {
        "id": ["void", "a/0@infer-bf16"],
        "prompt_id": ["void", "a"],
        "token_texts": [["x"], texts],
        "token_ids": [[0], list(range(LENGTH))],
    }
    if mask is not None:
        columns["sampled"] = [[True], mask.tolist()]
    log_mu = np.full(diff.size, -2.0)
    counts = Counts(
        num_sequences=1,
        num_tokens=diff.size,
        missing_mu=0,
        missing_pi=0,
        nonfinite_mu=0,
        nonfinite_pi=0,
        mismatched_ids=0,
        truncated_responses=0,
    )
    pair = TokenPair(Sequences.of_lengths([diff.size]), log_mu + diff, log_mu)
    return PairData({}, counts, pair, pa.table(columns), np.array([1]))


def test_a_long_response_is_recorded_around_its_worst_token() -> None:
    diff = np.zeros(LENGTH)
    diff[700] = 0.5
    [response] = worst_with_tokens(data_of(diff), {"a": "x" * PROMPT_CHARACTERS + "?"})
    assert response.sequence_id == "a/0@infer-bf16"
    assert response.num_tokens == LENGTH
    assert response.prompt == "x" * (PROMPT_CHARACTERS - 1) + "?"
    assert len(response.tokens) == RESPONSE_TOKENS
    place = 700 - response.first
    assert response.tokens[place] == "t700"
    assert response.log_pi[place] == -1.5
    assert response.log_mu[place] == -2.0


def test_tokens_that_were_not_sampled_have_no_log_probs() -> None:
    mask = np.arange(LENGTH) % 2 == 1
    diff = np.zeros(LENGTH // 2)
    diff[10] = -0.5
    [response] = worst_with_tokens(data_of(diff, mask), {})
    assert (response.first, response.prompt, response.tokens[21]) == (0, None, "t21")
    assert response.log_pi[20:22] == [None, -2.5]
    [worst, *_] = worst_in_context(data_of(diff, mask))
    assert worst.position == 21


def test_a_response_without_a_token_to_look_at_is_not_recorded() -> None:
    assert worst_with_tokens(data_of(np.full(LENGTH, 0.009)), {}) == []
