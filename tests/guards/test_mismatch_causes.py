"""Causes of a mismatch by simulated responses: each named by its own signature, and none by another's."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.guards import Guards

RESPONSES, LENGTH, VOCABULARY, STEPS, ONSET = 24, 40, 40, 14, 9
Floats = np.ndarray[Any, Any]


def normalised(logits: Floats) -> Floats:
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


class Step:
    """Tokens drawn from mu, by sides whose logits differ by rounding, at a step whose number is given."""

    def __init__(self, number: int, *, pi: Callable[[Floats], Floats], mu: Callable[[Floats], Floats]) -> None:
        random = np.random.default_rng(number)
        logits = random.normal(0, 3, (RESPONSES * LENGTH, VOCABULARY))
        log_mu, log_pi = normalised(mu(logits)), normalised(pi(logits) + random.normal(0, 0.02, logits.shape))
        rows = np.arange(len(logits))
        tokens = np.array([random.choice(VOCABULARY, p=np.exp(row)) for row in log_mu])
        shape = RESPONSES, LENGTH
        self.log_pi, self.log_mu = log_pi[rows, tokens].reshape(shape), log_mu[rows, tokens].reshape(shape)
        self.entropy = -(np.exp(log_pi) * log_pi).sum(axis=1).reshape(shape)

    def batch(self, *, with_entropy: bool) -> Batch:
        return Batch(self.log_pi, self.log_mu, True, entropy=self.entropy if with_entropy else None)


def same(logits: Floats) -> Floats:
    return logits


def at_temperature(logits: Floats) -> Floats:
    return logits / 0.7


def other_weights(logits: Floats) -> Floats:
    return logits + np.random.default_rng(7).normal(0, 1.0, logits.shape)


def mu_a_token_late(batch: Batch) -> Batch:
    return replace(batch, log_mu=np.roll(np.asarray(batch.log_mu), 1, axis=1))


def pi_a_token_late(batch: Batch) -> Batch:
    return replace(batch, log_pi=np.roll(np.asarray(batch.log_pi), 1, axis=1))


def one_token_replaced(batch: Batch) -> Batch:
    log_pi = np.array(batch.log_pi)
    log_pi[:, LENGTH // 2] = -14.0
    return replace(batch, log_pi=log_pi)


def untouched(batch: Batch) -> Batch:
    return batch


def diagnosed(
    change: Callable[[Batch], Batch] = untouched,
    *,
    with_entropy: bool = True,
    repeated: bool = False,
    metrics: Mapping[str, float] | None = None,
    **sides: Callable[[Floats], Floats],
) -> Diagnosis:
    """What a loop's guards say last, where a fault begins at `ONSET`."""
    guards = Guards.default()
    for number in range(1, STEPS + 1):
        faulty = number >= ONSET
        chosen = {"pi": same, "mu": same} | (sides if faulty else {})
        step = Step(ONSET if faulty and repeated else number, **chosen)
        batch = step.batch(with_entropy=with_entropy)
        guards.observe(change(batch) if faulty else batch, metrics=metrics)
    return guards.diagnosis()


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("change", [mu_a_token_late, pi_a_token_late])
def test_log_probs_that_are_a_token_late_on_either_side_are_named(
    change: Callable[[Batch], Batch], with_entropy: bool
) -> None:
    assert diagnosed(change, with_entropy=with_entropy).cause is EndCause.LABEL_OFFSET


def first_token_impossible(batch: Batch) -> Batch:
    log_pi = np.array(batch.log_pi)
    log_pi[0, 0] = -900.0
    return replace(batch, log_pi=log_pi)


def last_tokens_impossible(batch: Batch) -> Batch:
    log_pi = np.array(batch.log_pi)
    log_pi[:, -1] = -60.0
    return replace(batch, log_pi=log_pi)


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("change", [first_token_impossible, last_tokens_impossible])
def test_far_tokens_that_a_shift_by_one_drops_are_no_shift(
    change: Callable[[Batch], Batch], with_entropy: bool
) -> None:
    assert diagnosed(change, with_entropy=with_entropy).cause is not EndCause.LABEL_OFFSET


def in_another_order(batch: Batch) -> Batch:
    return replace(batch, log_pi=np.asarray(batch.log_pi)[np.random.default_rng(3).permutation(RESPONSES)])


def two_exchanged(batch: Batch) -> Batch:
    order = np.arange(RESPONSES)
    order[[4, 9]] = order[[9, 4]]
    return replace(batch, log_pi=np.asarray(batch.log_pi)[order])


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("change", [in_another_order, two_exchanged])
def test_responses_that_were_exchanged_are_mispaired(change: Callable[[Batch], Batch], with_entropy: bool) -> None:
    found = diagnosed(change, with_entropy=with_entropy)
    assert found.cause is EndCause.MISPAIRED
    assert "carry the log-probs of another response of the batch" in found.sentence


def test_responses_of_one_length_and_of_others_are_paired_by_their_tokens() -> None:
    """Rows of a padded array move with their padding, which the other row's mask then counts or not."""
    step = Step(1, pi=same, mu=same)
    lengths = np.random.default_rng(0).integers(24, LENGTH + 1, RESPONSES)
    mask = np.arange(LENGTH) < lengths[:, None]
    order = np.random.default_rng(1).permutation(RESPONSES)
    kept = np.where(mask, step.log_pi, np.nan)[order]
    sums = Batch(kept, step.log_mu, mask & np.isfinite(kept)).measure()
    assert sums.partners.are_exchanged


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("side", ["pi", "mu"])
def test_a_temperature_is_named_where_the_log_has_no_entropy_too(side: str, with_entropy: bool) -> None:
    assert diagnosed(with_entropy=with_entropy, **{side: at_temperature}).cause is EndCause.TEMPERATURE


@pytest.mark.parametrize("with_entropy", [True, False])
def test_a_token_that_is_replaced_in_each_response_is_no_other_sampler(with_entropy: bool) -> None:
    found = diagnosed(one_token_replaced, with_entropy=with_entropy)
    assert found.cause is EndCause.TOKENS_REPLACED
    assert "in 100 % of the responses" in found.sentence


def test_responses_that_come_again_are_named() -> None:
    assert diagnosed(repeated=True, pi=other_weights).cause is EndCause.BATCH_REPEATED


@pytest.mark.parametrize("with_entropy", [True, False])
def test_other_weights_on_one_side_are_unknown_with_what_their_numbers_rule_out(with_entropy: bool) -> None:
    found = diagnosed(with_entropy=with_entropy, pi=other_weights)
    assert found.cause is EndCause.UNEXPLAINED
    for cause in ("shifted by one token", "a temperature", "rounding", "a repeated batch"):
        assert cause in found.sentence


def test_sides_that_differ_by_rounding_are_given_no_cause_of_a_mismatch() -> None:
    assert diagnosed().cause is EndCause.UNEXPLAINED
    assert "Ruled out" not in diagnosed().sentence


SOUND_PROBE = {
    "sync/probe_k3": 1e-6,
    "sync/probe_logit_error": 8e-4,
    "sync/weights_compared": 1.0,
    "sync/weights_other": 0.0,
    "sync/weights_unchanged": 0.0,
}


def test_sides_that_agree_on_the_probe_and_not_on_responses_recorded_other_scores() -> None:
    found = diagnosed(metrics=SOUND_PROBE, pi=other_weights)
    assert found.cause is EndCause.OTHER_SCORES
    assert "KL 1.00e-6" in found.sentence


def test_a_probe_that_departs_at_equal_weights_is_another_computation() -> None:
    departed = {**SOUND_PROBE, "sync/probe_k3": 0.8, "sync/probe_logit_error": 0.06}
    found = diagnosed(metrics=departed, pi=other_weights)
    assert found.cause is EndCause.COMPUTATION
    assert "no digest of a weight differs" in found.sentence


def test_the_sums_of_ranks_give_the_evidence_of_the_whole_batch() -> None:
    step = Step(1, pi=other_weights, mu=same)
    complete_batch = one_token_replaced(step.batch(with_entropy=True))
    parts = [
        Batch(
            np.asarray(complete_batch.log_pi)[rows],
            np.asarray(complete_batch.log_mu)[rows],
            True,
            entropy=np.asarray(complete_batch.entropy)[rows],
        )
        for rows in (slice(0, 7), slice(7, None))
    ]
    first, second = (part.measure() for part in parts)
    together = type(first).of_arrays([first.to_array(), second.to_array()]).metrics()
    for name, value in complete_batch.measure().metrics().items():
        if name.startswith(("mismatch/far", "mismatch/s", "mismatch/logprob", "mismatch/logit", "mismatch/error")):
            assert together[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
