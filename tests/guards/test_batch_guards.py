"""A batch without tokens and one that comes again are named and answered; new samples of old prompts are not."""

import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rewards import NEW, SeenBatches, return_nats
from tests.guards.steps import LEARNT, RESPONSES, TOKENS, batch, fired

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off")


def decided(batches: Iterator[Batch]) -> list[Decision]:
    guards = Guards.default(can={"skip", "stop"})
    return [guards.observe(each, **LEARNT) for each in batches]


def without_tokens(step: int) -> Batch:
    return batch(step, mask=np.zeros((RESPONSES, TOKENS)))


def test_a_mask_that_is_all_zero_from_a_step_on_is_named_at_once_its_updates_withheld_and_the_run_ended() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="guards that are off")
        decisions = decided(batch(step) if step < 6 else without_tokens(step) for step in range(1, 11))
    assert [fired(decision.events) for decision in decisions] == [set()] * 5 + [{"no-tokens"}] * 5
    assert [decision.skip for decision in decisions] == [False] * 5 + [True] * 5
    assert [decision.stop for decision in decisions] == [False] * 9 + [True]
    diagnosis = decisions[5].diagnosis
    assert diagnosis is not None
    assert diagnosis.cause is EndCause.NO_TOKENS
    assert "the last 1 step the mask left none" in diagnosis.sentence
    assert "the last 5 steps" in str(decisions[-1].diagnosis)


@pytest.mark.slow
def test_one_step_without_a_token_costs_its_update_alone() -> None:
    decisions = decided(without_tokens(step) if step == 4 else batch(step) for step in range(1, 20))
    assert [decision.step for decision in decisions if decision.events] == [4]


def test_a_batch_that_comes_again_for_ever_is_warned_of_at_the_third_time_and_ends_the_run_at_the_eleventh() -> None:
    decisions = decided(batch(min(step, 5)) for step in range(1, 16))
    seen = {decision.step: decision for decision in decisions if decision.events}
    assert list(seen) == [7, 9, 11, 13, 15]
    assert all(fired(decision.events) == {"repeated-batch"} for decision in seen.values())
    assert [decision.stop for decision in seen.values()] == [False] * 4 + [True]
    diagnosis = seen[7].diagnosis
    assert diagnosis is not None
    assert diagnosis.cause is EndCause.BATCH_REPEATED
    assert "in each of the last 3 steps" in diagnosis.sentence


def test_a_batch_that_comes_again_in_another_order_is_the_same() -> None:
    first, random = batch(1), np.random.default_rng(0)

    def shuffled() -> Batch:
        order = random.permutation(RESPONSES)
        names = ("log_pi", "log_mu", "mask", "entropy", "prompt_ids", "rewards", "truncated")
        return replace(first, **{name: np.asarray(getattr(first, name))[order] for name in names})

    assert fired(decided(shuffled() for _ in range(3))[-1].events) == {"repeated-batch"}


@pytest.mark.slow
def test_several_epochs_over_the_same_prompts_with_new_samples_fire_nothing() -> None:
    decisions = decided(batch(step, prompt_ids=np.repeat(np.arange(4) + 4 * (step % 2), 4)) for step in range(1, 41))
    assert not any(decision.events for decision in decisions)


@pytest.mark.parametrize("distance", [2, 7])
def test_batches_that_come_in_turn_are_named_with_their_distance(distance: int) -> None:
    decisions = decided(batch(step % distance) for step in range(1, distance + 3))
    first = next(decision for decision in decisions if decision.events)
    assert (first.step, fired(first.events)) == (distance + 1, {"returned-batch"})
    assert first.metrics["response/returned_after"] == distance
    assert f"the number of steps since the same responses came last is {distance}, above" in str(first)
    assert first.diagnosis is not None
    assert first.diagnosis.cause is EndCause.BATCH_REPEATED
    assert f"as {distance} steps before the mean log-prob of mu is" in first.diagnosis.sentence
    assert not any(decision.skip or decision.stop for decision in decisions)


@pytest.mark.slow
def test_64_steps_without_a_new_batch_end_the_run() -> None:
    decisions = decided(batch(step % 3) for step in range(1, 69))
    assert [decision.step for decision in decisions if decision.stop] == [67, 68]
    assert "no-new-batch" in fired(decisions[-1].events)
    assert decisions[-1].diagnosis is not None
    assert decisions[-1].diagnosis.cause is EndCause.BATCH_REPEATED


@pytest.mark.slow
def test_one_of_64_batches_is_remembered_and_no_older_one() -> None:
    for distance, is_seen in ((64, True), (65, False)):
        decisions = decided(batch(step % distance) for step in range(1, distance + 2))
        assert ("returned-batch" in fired(decisions[-1].events)) == is_seen


def short_answers(seed: int, responses: int = 64) -> Batch:
    """Of 3 tokens, 1.9 nats on average, of one prompt; mu as it was recorded."""
    random = np.random.default_rng(seed)
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    log_mu = np.log(probs[random.choice(4, (responses, 3), p=probs)] ** 0.55)
    rewards = random.integers(0, 2, responses)
    return Batch(log_mu + 1e-3 * random.standard_normal(log_mu.shape), log_mu, True, rewards=rewards)


def returned(batches: Iterator[Batch]) -> list[int]:
    return [decision.step for decision in decided(batches) if "returned-batch" in fired(decision.events)]


def test_many_short_answers_that_come_in_turn_are_seen_once_chance_does_not_make_it() -> None:
    assert returned(short_answers(step % 3) for step in range(1, 10)) == [5, 6, 7, 8, 9]


def test_few_short_answers_may_come_again() -> None:
    assert returned(short_answers(step % 3, responses=2) for step in range(1, 10)) == []


@pytest.mark.slow
@pytest.mark.parametrize("digits", [1, 2, 3])
def test_new_samples_whose_log_probs_are_rounded_are_none_of_those_before(digits: int) -> None:
    random = np.random.default_rng(digits)
    for _ in range(8):
        sides = (np.round(-random.exponential(1, (4, 16)), digits) for _ in range(60))
        assert returned(Batch(side + 1e-3, side, True, rewards=random.random(4)) for side in sides) == []


def test_the_chance_of_a_return_falls_with_the_responses_and_with_their_surprisal() -> None:
    assert return_nats(1, 12) == pytest.approx(12)
    assert return_nats(64, 120) == pytest.approx(13, abs=1)
    assert return_nats(64, 0) == return_nats(1, 0) == 0
    assert return_nats(8, 0.24) == 0.24
    assert return_nats(2, 2 * np.log(2)) == pytest.approx(np.log(2))
    nats = [return_nats(count, 2.0 * count) for count in (1, 2, 4, 8, 16, 64, 512)]
    assert nats[3:] == sorted(nats[3:])


def test_replayed_responses_are_told_by_what_the_sampler_said_of_them() -> None:
    """Its recorded log-probs are old; those that it scored anew are a measurement of their own."""
    first = batch(1)
    anew = replace(first, log_mu=np.asarray(first.log_mu) * 1.0001)
    assert not any(decision.events for decision in decided(iter([first, batch(2), anew])))
    recorded = replace(first, log_pi=np.asarray(first.log_pi) * 1.0001)
    assert fired(decided(iter([first, batch(2), recorded]))[-1].events) == {"returned-batch"}


def of_one_token_each(
    random: np.random.Generator, responses: int, probability: float, decimals: int | None = None
) -> dict[str, float]:
    """Metrics of answers yes or no, the first one with this probability; of weights that stand still."""
    log_probs = np.log([probability, 1 - probability])
    log_mu = (log_probs if decimals is None else np.round(log_probs, decimals))[
        random.choice(2, responses, p=[probability, 1 - probability])
    ]
    return {
        "mismatch/logprob_mu": float(log_mu.mean()),
        "mismatch/logprob_mu_rms": float(np.sqrt(np.mean(log_mu**2))),
        "response/length_mean": 1.0,
        "response/length_max": 1.0,
        "response/return_nats": return_nats(responses, -log_mu.sum()),
    }


@pytest.mark.parametrize(
    ("responses", "probability", "decimals"),
    [(8, 0.97, None), (32, 0.98, None), (8, 0.999, None), (8, 0.9, 2), (64, 0.99, 3), (8, 0.5, 2), (1, 0.5, None)],
)
def test_likely_answers_that_are_sampled_anew_are_no_old_batch(
    responses: int, probability: float, decimals: int | None
) -> None:
    for seed in range(2):
        random, seen = np.random.default_rng(seed), SeenBatches()
        for _ in range(200):
            assert seen.take(of_one_token_each(random, responses, probability, decimals)) == NEW


@pytest.mark.parametrize(("probability", "most_steps"), [(0.97, 60), (0.9, 24), (0.7, 22)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_likely_answers_that_come_again_for_ever_are_seen_after_enough_steps(
    probability: float, most_steps: int, seed: int
) -> None:
    metrics, seen = (
        of_one_token_each(np.random.default_rng(seed), 8, probability),
        SeenBatches(),
    )
    repeats = [seen.take(metrics)["response/repeats"] for _ in range(most_steps)]
    assert repeats[-1] == most_steps - 1
    assert repeats[:5] == [0] * 5


def test_a_rare_batch_that_comes_again_among_many_likely_ones_is_no_old_batch() -> None:
    """Steps in a row are judged each by its own chance."""
    seen, likely = SeenBatches(), {"mismatch/logprob_mu": -0.01, "response/return_nats": 0.1}
    rare = {"mismatch/logprob_mu": -0.03, "response/return_nats": 5.0}
    for step in range(60):
        assert seen.take(rare if step in (5, 50) else likely)["response/returned_after"] == 0


def test_what_few_likely_steps_said_is_known_to_restored_guards() -> None:
    metrics = of_one_token_each(np.random.default_rng(0), 8, 0.7)
    seen = SeenBatches()
    for _ in range(39):
        seen = SeenBatches.of_state(seen.state(), ())
        repeats = seen.take(metrics)["response/repeats"]
    assert repeats == 38


@pytest.mark.slow
def test_a_sure_policy_whose_only_prompt_is_solved_alike_in_every_step_is_not_stopped() -> None:
    """Nothing is learnt from it, so it may come again; that it is constant is warned of."""
    solved = batch(1, rewards=np.ones(RESPONSES))
    decisions = decided(solved for _ in range(30))
    assert not any(decision.stop or decision.skip for decision in decisions)
    assert set().union(*(fired(decision.events) for decision in decisions)) == {"constant-reward"}


def test_restored_guards_know_that_a_batch_comes_again() -> None:
    guards = Guards.default(can={"stop"})
    for _ in range(2):
        assert not guards.observe(batch(1), **LEARNT).events
    restored = Guards.default(can={"stop"})
    restored.load_state_dict(guards.state_dict())
    assert fired(restored.observe(batch(1), **LEARNT).events) == {"repeated-batch"}


def test_restored_guards_know_the_batches_of_long_ago_and_so_do_those_of_a_state_without_them() -> None:
    guards = Guards.default(can={"stop"})
    for step in range(1, 6):
        guards.observe(batch(step), **LEARNT)
    state = guards.state_dict()
    for saved in (state, {name: value for name, value in state.items() if name != "batches"}):
        restored = Guards.default(can={"stop"})
        restored.load_state_dict(saved)
        assert fired(restored.observe(batch(2), **LEARNT).events) == {"returned-batch"}
