from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_probe.engines.vllm.outputs import num_missing, replayed_scores, scores, whole_distributions
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import TokenSequence

pytestmark = pytest.mark.filterwarnings("ignore")


def flat(*positions):
    """vLLM's record of (token, log-prob, arg-max token) each; None where the engine delivered nothing."""
    from vllm.logprobs import FlatLogprobs

    logprobs = FlatLogprobs()
    for position in positions:
        if position is None:
            logprobs.append(None)
        else:
            token, logprob, top1 = position
            logprobs.append_fast([token, top1], [logprob, -0.1], iter([2, 1]), [None, None])
    return logprobs


@pytest.mark.slow
def test_each_token_keeps_its_log_prob_and_the_arg_max_beside_it():
    scored = scores("a", [5, 6], flat((5, -1.5, 9), (6, -0.1, 6)), first=0)
    np.testing.assert_array_equal(scored.logprobs, np.float32([-1.5, -0.1]))
    np.testing.assert_array_equal(scored.top1_ids, [9, 6])


@pytest.mark.slow
def test_a_missing_log_prob_is_nan_and_counted_never_zero():
    scored = scores("a", [5, 6, 7], flat((5, -1.5, 9), None), first=0)
    np.testing.assert_array_equal(np.isnan(scored.logprobs), [False, True, True])
    np.testing.assert_array_equal(scored.top1_ids, [9, -1, -1])
    assert num_missing([scored]) == 2


def test_vllms_floor_for_minus_infinity_or_worse_is_a_missing_log_prob():
    scored = scores("a", [5, 6, 7], flat((5, -1.5, 9), (6, -9999.0, 6), (7, -9900.0, 6)), first=0)
    np.testing.assert_array_equal(np.isnan(scored.logprobs), [False, True, False])
    assert num_missing([scored]) == 1


def test_no_log_probs_at_all_are_all_missing():
    assert num_missing([scores("a", [5, 6], None, first=0)]) == 2


def test_the_log_prob_of_another_token_is_refused():
    with pytest.raises(EngineError, match="token 8 where a has 6"):
        scores("a", [5, 6], flat((5, -1.5, 9), (8, -0.1, 6)), first=0)


def test_a_position_that_holds_one_token_has_it_as_the_arg_max():
    from vllm.logprobs import FlatLogprobs, Logprob

    logprobs = FlatLogprobs()
    logprobs.append({5: Logprob(logprob=-0.5, rank=1)})
    scored = scores("a", [5], logprobs, first=0)
    np.testing.assert_array_equal(scored.logprobs, np.float32([-0.5]))
    np.testing.assert_array_equal(scored.top1_ids, [5])


def test_replay_keeps_the_response_part_only():
    output = SimpleNamespace(prompt_token_ids=[1, 2, 5], prompt_logprobs=flat(None, (2, -3.0, 4), (5, -1.5, 9)))
    scored = replayed_scores(TokenSequence("a", [1, 2], [5]), output)
    np.testing.assert_array_equal(scored.logprobs, np.float32([-1.5]))


def test_replay_of_other_ids_than_those_given_is_refused():
    output = SimpleNamespace(prompt_token_ids=[1, 3, 5], prompt_logprobs=flat(None, (3, -3.0, 4), (5, -1.5, 9)))
    with pytest.raises(EngineError, match="other token ids"):
        replayed_scores(TokenSequence("a", [1, 2], [5]), output)


def test_a_whole_distribution_stands_by_token_id_and_what_is_absent_is_nan():
    complete_answer = SimpleNamespace(outputs=[SimpleNamespace(logprobs=flat((2, -1.5, 0)))])
    absent = SimpleNamespace(outputs=[SimpleNamespace(logprobs=flat())])
    rows = whole_distributions([complete_answer, absent], vocab_size=3)
    np.testing.assert_array_equal(rows, np.float32([[-0.1, np.nan, -1.5], [np.nan] * 3]))
