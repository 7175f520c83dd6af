"""A side that contradicts itself is named, and what is computed twice in too little judges nothing."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Verdict
from mismatch_probe.stats.sequences import Repeat, Sequences
from mismatch_probe.verdict.departures import rounding_floor
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.weights import not_repeatable, with_unshown_repetitions
from tests.verdict.simulated import clean, disagreement, log_softmax, with_logits, with_pair, world

SHARED_START = "one token behind equal tokens has other log-probs in each prompt"
VERDICT = Verdict(kind="precision", code=Code.PRECISION, sentence="Precision.")


def test_a_leg_that_differs_when_run_again_is_not_repeatable() -> None:
    given = world()
    deviations = clean(given)
    again = deviations.pair.log_pi + given.generator.normal(size=deviations.pair.log_pi.size) * 0.01
    repeat = Repeat(deviations.pair.sequences, deviations.pair.log_pi, again)
    cause = not_repeatable(with_pair(deviations, repeats={"pi_again": repeat}))
    assert cause is not None
    assert cause.sentence.startswith("The training path does not agree with itself")


@pytest.mark.parametrize(
    ("responses", "tokens", "is_named"), [(1, 80, False), (2, 80, False), (6, 4, False), (6, 40, True)]
)
def test_too_little_that_was_computed_twice_shows_no_side_that_contradicts_itself(
    responses: int, tokens: int, is_named: bool
) -> None:
    deviations = clean(world(), Dtype.BF16)
    sequences = Sequences.of_lengths([tokens] * responses)
    first = deviations.pair.log_mu[: sequences.num_tokens]
    repeat = Repeat(sequences, first, first - np.float32(20 * deviations.floor))
    repeated = with_pair(deviations, repeats={"mu_decoded_alone": repeat})
    assert (not_repeatable(repeated) is not None) is is_named
    verdict = with_unshown_repetitions(repeated, VERDICT)
    assert ("floors.num_sequences" in "".join(verdict.advice)) is not is_named
    assert (f"{responses * tokens} tokens" in "".join(verdict.evidence)) is not is_named
    assert with_unshown_repetitions(deviations, VERDICT) == VERDICT


@pytest.mark.parametrize(("tokens", "is_named"), [([3], False), ([3, -3], True)])
def test_what_one_response_alone_shows_is_told_and_no_verdict(tokens: list[int], is_named: bool) -> None:
    """A near tie between experts moves a token by nats in 16 bits, and no other response."""
    deviations = clean(world(), Dtype.BF16)
    first = deviations.pair.log_pi
    second = first.copy()
    second[tokens] -= 3000 * np.float32(deviations.floor)
    repeat = Repeat(deviations.pair.sequences, first, second)
    repeated = with_pair(deviations, repeats={"pi_other_batch": repeat})
    assert (not_repeatable(repeated) is not None) is is_named
    evidence = "".join(with_unshown_repetitions(repeated, VERDICT).evidence)
    assert ("in one response alone" in evidence) is not is_named


def test_log_probs_that_hang_on_their_batch_are_not_repeatable_and_another_attention_is_no_repeat() -> None:
    deviations = clean(world())
    repeat = Repeat(deviations.pair.sequences, deviations.pair.log_pi, deviations.pair.log_pi - np.float32(0.01))
    cause = not_repeatable(with_pair(deviations, repeats={"pi_other_batch": repeat}))
    assert cause is not None
    assert "what shares the batch" in cause.sentence
    assert not_repeatable(with_pair(deviations, repeats={"pi_other_attention": repeat})) is None


def test_a_repeat_within_rounding_is_repeatable() -> None:
    deviations = clean(world(), Dtype.BF16)
    repeat = Repeat(
        deviations.pair.sequences, deviations.pair.log_pi, deviations.pair.log_pi + np.float32(0.5 * deviations.floor)
    )
    assert not_repeatable(with_pair(deviations, repeats={"pi_again": repeat})) is None


def test_decode_against_prefill_is_the_engines_own_contradiction() -> None:
    given = world()
    deviations = with_logits(given, mu=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    cause = not_repeatable(with_pair(deviations, log_mu_prefill=deviations.pair.log_ref))
    assert cause is not None
    assert cause.sentence.startswith("The engine does not agree with itself")


def test_a_prefill_of_more_tokens_than_were_sampled_from_contradicts_nothing() -> None:
    given = world()
    deviations = with_logits(given, mu=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    deviations = with_pair(deviations, log_mu_prefill=deviations.pair.log_ref)
    assert not_repeatable(deviations) is not None
    assert not_repeatable(replace(deviations, repeats_decode=False)) is None


def test_dropout_shows_in_two_fp32_passes_that_contradict_each_other() -> None:
    given = world()
    first, second = (given.logits + given.generator.normal(size=given.logits.shape) * 0.05 for _ in range(2))
    deviations = with_logits(given, pi=first)
    noisy_reference = log_softmax(second)
    chosen = np.abs(log_softmax(given.logits) - deviations.pair.log_mu[:, None]).argmin(axis=1)
    pair = replace(deviations.pair, log_ref=noisy_reference[np.arange(chosen.size), chosen])
    cause = not_repeatable(disagreement(given, pair))
    assert cause is not None
    assert "two FP32 passes" in cause.sentence


def test_a_training_path_that_errs_twice_alike_repeats_itself() -> None:
    given = world()
    deviations = with_logits(given, mu=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    assert not_repeatable(deviations) is None


def test_an_engine_in_16_bit_is_held_to_its_own_errors_where_the_training_path_is_the_reference() -> None:
    """An FP32 training path has no error against an FP32 reference, so the pair's floor says nothing of the engine."""
    given = world()
    deviations = clean(given, Dtype.BF16)
    log_ref = deviations.pair.log_ref
    assert log_ref is not None
    pair = replace(deviations.pair, log_pi=log_ref)
    deviations = replace(
        deviations, pair=pair, train_dtype=Dtype.FP32, floor=rounding_floor(pair, Dtype.FP32, Dtype.BF16)
    )
    noise = given.generator.normal(size=pair.log_mu.size) * deviations.rms
    for name in ("mu_other_batch", "mu_decoded_alone", "mu_cached"):
        for times, is_named in ((1.0, False), (20.0, True)):
            repeat = Repeat(pair.sequences, pair.log_mu, (pair.log_mu - times * np.abs(noise)).astype(np.float32))
            assert (not_repeatable(with_pair(deviations, repeats={name: repeat})) is not None) is is_named


@pytest.mark.parametrize(
    ("name", "is_named"), [("pi_again", True), ("pi_other_batch", False), ("mu_other_batch", False)]
)
def test_without_a_reference_another_batch_in_16_bit_contradicts_nothing(name: str, is_named: bool) -> None:
    """Decode and prefill can be one kernel, so that their difference is no floor for another batch."""
    deviations = with_pair(clean(world(), Dtype.BF16), log_ref=None)
    first = deviations.pair.log_pi
    second = first - np.float32(30 * deviations.floor)
    repeated = with_pair(deviations, repeats={name: Repeat(deviations.pair.sequences, first, second)})
    assert (not_repeatable(repeated) is not None) is is_named


def in_two_prompts(size: float, side: str = "pi") -> Disagreement:
    """An FP32 pair known to differ, one token of which a side scored behind equal tokens with so many nats between."""
    given = world()
    deviations = with_logits(given, pi=given.logits + given.generator.normal(size=given.logits.shape) * 0.05)
    repeat = Repeat(Sequences.of_lengths([1]), np.array([-1.0]), np.array([-1.0 - size]))
    start = with_pair(clean(world(num_tokens=60, seed=1)), repeats={f"{side}_starts": repeat})
    return replace(deviations, prompt_start=start)


@pytest.mark.parametrize(("side", "who"), [("pi", "The training path"), ("mu", "The engine")])
def test_a_side_that_gives_one_token_behind_equal_tokens_other_log_probs_is_not_repeatable(side: str, who: str) -> None:
    """As behind padding that is attended to, of which each prompt has another amount: one token shows it in FP32."""
    cause = not_repeatable(in_two_prompts(0.2, side))
    assert cause is not None
    assert cause.sentence == f"{who} does not agree with itself: {SHARED_START}."


def test_one_token_in_two_prompts_accuses_nobody_by_rounding_in_16_bits_or_by_experts() -> None:
    other = in_two_prompts(0.2)
    assert not_repeatable(in_two_prompts(5e-5)) is None
    for known in ({"train_dtype": Dtype.BF16}, {"is_settled": False}, {"has_experts": True}):
        assert not_repeatable(replace(other, **known)) is None
