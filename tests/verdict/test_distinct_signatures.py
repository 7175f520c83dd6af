"""Causes whose shape rounding cannot take: found at the strengths that matter, never in each other or in clean runs."""

import re
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, TokenPair
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.profile import SIGNATURES
from mismatch_probe.verdict.signatures.recording import label_offset, mispaired_rows, one_sided_dtype, rounded_logprobs
from mismatch_probe.verdict.signatures.sampling import sampled_otherwise, temperature, truncated_support
from tests.verdict.simulated import (
    World,
    clean,
    disagreement,
    log_softmax,
    noisy,
    pair_of,
    with_logits,
    with_pair,
    world,
)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP16, Dtype.BF16])
@pytest.mark.parametrize("seed", range(4))
def test_no_distinct_cause_is_seen_in_a_clean_run(dtype: Dtype, seed: int) -> None:
    deviations = clean(world(seed=seed), dtype)
    assert [test(deviations) for test in list(SIGNATURES)[:8]] == [None] * 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_a_handful_of_clean_tokens_is_accused_of_nothing(dtype: Dtype, num_tokens: int) -> None:
    for seed in range(150):
        given = world(num_sequences=1 + seed % 4, num_tokens=num_tokens, seed=seed)
        deviations = replace(clean(given, dtype), formats_alone=True)
        assert not signatures(deviations)
        assert one_sided_dtype(deviations) is None


@pytest.mark.parametrize("value", [0.6, 0.8, 0.95, 0.999, 1.001, 1.3])
def test_a_temperature_on_one_side_is_named_with_its_ratio(value: float) -> None:
    given = world()
    cause = temperature(with_logits(given, mu=given.logits / value))
    assert cause is not None
    assert float(cause.sentence.split(" times")[0].split()[-1]) == pytest.approx(1 / value, rel=0.03)


def test_a_temperature_is_seen_through_16_bit_rounding() -> None:
    given = world()
    assert temperature(with_logits(given, Dtype.BF16, mu=given.logits / 0.7)) is not None


@pytest.mark.parametrize("value", [0.9, 0.97, 1.05])
def test_a_slight_temperature_is_seen_through_16_bit_rounding_without_a_reference(value: float) -> None:
    given = world()
    pair = replace(with_logits(given, Dtype.BF16, mu=given.logits / value).pair, log_ref=None)
    cause = temperature(disagreement(given, pair, Dtype.BF16))
    assert cause is not None
    assert float(cause.sentence.split(" times")[0].split()[-1]) == pytest.approx(1 / value, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value", [0.7, 0.9])
def test_a_temperature_is_seen_in_texts_of_a_sure_model(value: float, seed: int) -> None:
    """Where only the likeliest token comes up, no half of the contexts tells of the slope."""
    given = world(spread=16, seed=seed)
    pair = replace(with_logits(given, Dtype.BF16, mu=given.logits / value).pair, log_ref=None)
    assert temperature(disagreement(given, pair, Dtype.BF16)) is not None


@pytest.mark.parametrize("seed", range(3))
def test_one_token_that_is_off_in_such_texts_is_no_temperature(seed: int) -> None:
    """A line through few numbers follows it."""
    deviations = clean(world(spread=16, seed=seed), Dtype.BF16)
    log_pi = deviations.pair.log_mu.copy()
    log_pi[np.argmin(log_pi)] -= 3
    assert temperature(with_pair(deviations, log_pi=log_pi, log_ref=None)) is None


@pytest.mark.parametrize("size", [0.03, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("side", ["pi", "mu"])
def test_other_weights_are_no_slight_temperature_without_a_reference(size: float, side: str) -> None:
    given = world()
    other = given.logits + given.generator.normal(size=given.logits.shape) * size
    pair = replace(with_logits(given, Dtype.BF16, **{side: other}).pair, log_ref=None)
    assert temperature(disagreement(given, pair, Dtype.BF16)) is None


def test_a_temperature_on_the_training_side_is_named_too() -> None:
    given = world()
    cause = temperature(with_logits(given, pi=given.logits / 0.8))
    assert cause is not None
    assert "0.8" in cause.sentence


def test_other_weights_are_no_temperature() -> None:
    given = world()
    other = given.logits + given.generator.normal(size=given.logits.shape) * 0.3
    assert temperature(with_logits(given, mu=other)) is None


def test_without_entropy_no_temperature_is_claimed() -> None:
    given = world()
    assert temperature(with_pair(with_logits(given, mu=given.logits / 0.8), entropy_pi=None)) is None


def nucleus(logits: Floats, top_p: float) -> Floats:
    """1 for the tokens that top-p keeps."""
    probability = np.exp(log_softmax(logits))
    order = np.argsort(-probability, axis=1)
    ranked = np.take_along_axis(probability, order, axis=1)
    kept = (np.cumsum(ranked, axis=1) - ranked) < top_p
    mask = np.zeros_like(logits)
    np.put_along_axis(mask, order, kept.astype(np.float64), axis=1)
    return mask


@pytest.mark.parametrize("top_p", [0.7, 0.95, 0.99, 0.999])
def test_a_truncated_support_is_named(top_p: float) -> None:
    given = world()
    pair = pair_of(given, noisy(given, Dtype.FP32), noisy(given, Dtype.FP32), kept=nucleus(given.logits, top_p))
    cause = truncated_support(disagreement(given, pair))
    assert cause is not None
    assert cause.sentence.startswith("The engine samples from part")
    assert signatures(disagreement(given, pair))[0].code == Code.TRUNCATED_SUPPORT


def flat_and_sharp(seed: int) -> World:
    """12 responses of 12 to 24 tokens, some of flat distributions and some of sharp ones."""
    given = world(num_sequences=12, num_tokens=24, seed=seed)
    scales = given.sequences.spread(given.generator.permutation(np.linspace(0.2, 4, 12)))[:, None]
    return replace(given, logits=given.generator.normal(size=given.logits.shape) * scales)


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_is_named_in_few_responses_of_which_it_cuts_some_deeper(seed: int) -> None:
    given = flat_and_sharp(seed)
    ranks = np.argsort(np.argsort(-given.logits, axis=1), axis=1)
    kept = (ranks < 20).astype(np.float64)
    pair = pair_of(given, noisy(given, Dtype.FP32), noisy(given, Dtype.FP32), kept=kept)
    assert truncated_support(disagreement(given, pair)) is not None


@pytest.mark.parametrize("seed", range(4))
def test_other_weights_whose_deviations_lean_to_one_side_are_no_cut(seed: int) -> None:
    """Many tokens lie on the wrong side of 0, though not as far, and some responses deviate more than others."""
    given = world(num_sequences=24, num_tokens=48, seed=seed)
    same = clean(given)
    size = given.sequences.spread(given.generator.permutation(np.linspace(0.1, 1, 24)))
    log_mu = same.pair.log_pi - size * given.generator.uniform(-0.3, 0.5, size.size)
    assert truncated_support(with_pair(same, log_mu=log_mu.astype(np.float32))) is None


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
@pytest.mark.parametrize("seed", range(4))
def test_few_responses_of_a_clean_run_have_no_truncated_support(dtype: Dtype, seed: int) -> None:
    assert truncated_support(clean(flat_and_sharp(seed), dtype)) is None


@pytest.mark.parametrize("has_ref", [True, False], ids=["with a reference", "without"])
@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_rounding_hides_no_truncated_support(top_p: float, has_ref: bool) -> None:
    """In BF16 what rounding does to a token is as large as what is cut."""
    given = world()
    pair = pair_of(given, noisy(given, Dtype.BF16), noisy(given, Dtype.BF16), kept=nucleus(given.logits, top_p))
    pair = pair if has_ref else replace(pair, log_ref=None)
    [cause] = signatures(disagreement(given, pair, Dtype.BF16))
    assert cause.code == Code.TRUNCATED_SUPPORT


@pytest.mark.parametrize("seed", range(4))
def test_rounding_and_its_bias_are_no_truncated_support(seed: int) -> None:
    """A log-softmax in 16 bit shifts every token by 0.005."""
    given = world(seed=seed)
    pair = pair_of(given, noisy(given, Dtype.BF16), noisy(given, Dtype.BF16))
    for biased in (pair.log_pi, pair.log_pi + np.float32(0.005)):
        for log_ref in (pair.log_ref, None):
            changed = replace(pair, log_pi=biased, log_ref=log_ref)
            assert truncated_support(disagreement(given, changed, Dtype.BF16)) is None


def test_a_truncated_support_is_seen_beside_another_temperature_by_the_engines_own_prefill() -> None:
    given = world()
    sharp = given.logits / 0.6
    kept = nucleus(sharp, 0.95)
    pair = pair_of(given, noisy(given, Dtype.FP32), noisy(given, Dtype.FP32, sharp), kept=kept)
    mass = np.log((np.exp(log_softmax(sharp)) * kept).sum(axis=1))
    replayed = replace(pair, log_mu_prefill=pair.log_mu + mass)
    assert truncated_support(disagreement(given, replayed)) is not None
    assert truncated_support(disagreement(given, pair)) is None


def test_a_truncated_training_side_is_the_training_paths() -> None:
    given = world()
    kept = nucleus(given.logits, 0.9)
    pair = pair_of(given, noisy(given, Dtype.FP32), noisy(given, Dtype.FP32), kept=kept)
    cause = truncated_support(disagreement(given, replace(pair, log_pi=pair.log_mu, log_mu=pair.log_pi)))
    assert cause is not None
    assert cause.sentence.startswith("The training path")


def test_a_constant_offset_is_no_truncated_support() -> None:
    deviations = clean(world())
    assert truncated_support(with_pair(deviations, log_mu=deviations.pair.log_pi + np.float32(0.02))) is None


def test_a_constant_offset_from_the_engines_own_prefill_is_a_truncated_support() -> None:
    """As of a top-p of 0.999 in a large vocabulary. Nothing else moves all tokens alike between the two."""
    deviations = clean(world())
    pair, offset = deviations.pair, np.float32(0.001)
    cut = with_pair(deviations, log_mu=pair.log_mu + offset, log_mu_prefill=pair.log_mu)
    assert truncated_support(cut) is not None
    assert truncated_support(with_pair(cut, log_mu=pair.log_mu - offset)) is None


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_shifted_log_probs_are_a_label_offset(shift: int, dtype: Dtype) -> None:
    deviations = clean(world(), dtype)
    cause = label_offset(with_pair(deviations, log_pi=np.roll(deviations.pair.log_pi, shift)))
    assert cause is not None
    assert f"{shift:+d}" in cause.sentence


def test_logits_read_late_are_a_label_offset_by_their_arg_max() -> None:
    given = world()
    late = np.roll(given.logits, -1, axis=0)
    deviations = with_logits(given, pi=late)
    cause = label_offset(deviations)
    assert cause is not None
    assert "arg-max" in cause.evidence[0]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_one_wild_token_at_the_edge_of_a_response_is_no_label_offset(place: int, dtype: Dtype) -> None:
    deviations = clean(world(num_sequences=2), dtype)
    log_pi = deviations.pair.log_pi.copy()
    log_pi[place] = -400.0
    assert label_offset(with_pair(deviations, log_pi=log_pi)) is None


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_a_label_offset_is_seen_beside_a_wild_token(dtype: Dtype) -> None:
    deviations = clean(world(), dtype)
    log_pi = np.roll(deviations.pair.log_pi, 1)
    log_pi[0] = -400.0
    assert label_offset(with_pair(deviations, log_pi=log_pi)) is not None


def test_unrelated_log_probs_are_no_label_offset() -> None:
    given = world()
    assert label_offset(with_logits(given, pi=given.generator.permutation(given.logits))) is None


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_exchanged_responses_are_mispaired(share: float) -> None:
    given = world()
    deviations = clean(given)
    chosen = np.arange(round(share * given.sequences.num_sequences))
    log_pi = np.split(deviations.pair.log_pi, given.sequences.offsets[1:-1])
    exchanged = list(log_pi)
    for row, donor in zip(chosen, np.roll(chosen, 1), strict=True):
        exchanged[row] = np.resize(log_pi[donor], log_pi[row].size)
    cause = mispaired_rows(with_pair(deviations, log_pi=np.concatenate(exchanged)))
    assert cause is not None
    assert cause.sentence.startswith(f"Responses are mispaired: {chosen.size} of 40")


def test_responses_that_are_off_on_their_own_are_not_mispaired() -> None:
    given = world()
    off = given.sequences.spread(np.arange(given.sequences.num_sequences) < 10)[:, None]
    other = given.logits + off * given.generator.normal(size=given.logits.shape)
    assert mispaired_rows(with_logits(given, pi=other)) is None


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_rounded_log_probs_are_seen_by_their_grid(dtype: Dtype) -> None:
    deviations = clean(world())
    raw = deviations.pair.log_pi.astype(np.float32)
    rounded = (
        raw.astype(np.float16).astype(np.float32)
        if dtype == "fp16"
        else (raw.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    )
    cause = rounded_logprobs(with_pair(deviations, log_pi=rounded))
    assert cause is not None
    assert f"the training path's log-probs are rounded to {dtype}" in cause.sentence
    assert "100 % of the log-probs of the training path" in cause.evidence[0]


def test_rounded_log_probs_of_few_tokens_are_seen_and_exact_ones_are_not() -> None:
    deviations = clean(world(num_sequences=2, num_tokens=40))
    pair = deviations.pair
    assert pair.log_pi.size < 80
    cause = rounded_logprobs(with_pair(deviations, log_pi=in_bf16(pair.log_pi)))
    assert cause is not None
    assert "the training path's log-probs are rounded to bf16" in cause.sentence
    assert rounded_logprobs(deviations) is None


def test_a_side_is_rounded_where_most_tokens_are_nearly_sure() -> None:
    """Log-probs so near to 0 are exact in 16 bits on both sides, as FP32 has no finer ones there."""
    deviations = clean(world())
    pair = deviations.pair
    is_sure = np.arange(pair.log_pi.size) % 10 > 0
    pi, mu = (np.where(is_sure, np.float32(-(2**-20)), leg) for leg in (pair.log_pi, pair.log_mu))
    assert rounded_logprobs(with_pair(deviations, log_pi=in_bf16(pi), log_mu=mu)) is not None
    assert rounded_logprobs(with_pair(deviations, log_pi=pi, log_mu=mu)) is None


def in_bf16(values: Floats) -> Floats:
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def with_others(values: Floats, count: int) -> Floats:
    """With so many written over, by numbers that are not exact in 16 bits."""
    changed = np.array(values)
    changed[np.linspace(0, changed.size - 1, count).astype(int)] -= np.float32(4.001)
    return changed


def test_few_tokens_off_the_grid_make_no_side_the_rounded_one() -> None:
    """Both sides were rounded, and ten tokens of one written over."""
    deviations = clean(world())
    pi, mu = in_bf16(deviations.pair.log_pi), in_bf16(deviations.pair.log_mu)
    for count in (1, 10, mu.size // 4):
        assert rounded_logprobs(with_pair(deviations, log_pi=with_others(pi, count), log_mu=mu)) is None


@pytest.mark.parametrize(("count", "least", "most"), [(0, 80, 100), (10, 0, 40)])
def test_a_side_is_rounded_though_a_few_of_its_tokens_were_written_over(count: int, least: float, most: float) -> None:
    deviations = clean(world())
    rounded = with_others(in_bf16(deviations.pair.log_mu), count)
    cause = rounded_logprobs(with_pair(deviations, log_mu=rounded))
    assert cause is not None
    assert "the engine's log-probs are rounded to bf16" in cause.sentence
    assert cause.evidence[0].startswith("100 %" if count == 0 else "99.")
    share = re.search(r"explains at most (\S+) % of the sum", cause.evidence[2])
    assert share is not None
    assert least <= float(share[1]) <= most


def test_a_side_of_which_a_part_was_rounded_is_none() -> None:
    deviations = clean(world())
    pair = deviations.pair
    half = np.where(np.arange(pair.log_mu.size) % 2 == 0, in_bf16(pair.log_mu), pair.log_mu)
    assert rounded_logprobs(with_pair(deviations, log_mu=half)) is None


def scored_tokens(given: World, temperature: float = 1.0, *, others: bool = False) -> TokenPair:
    """Both sides' log-probs at temperature 1 of tokens drawn at another, or pi's of other tokens."""
    pi, mu = log_softmax(noisy(given, Dtype.BF16)), log_softmax(noisy(given, Dtype.BF16))
    drawn = (log_softmax(given.logits / temperature) + given.generator.gumbel(size=pi.shape)).argmax(axis=1)
    rows, scored = np.arange(drawn.size), given.generator.permutation(50)[drawn] if others else drawn
    return TokenPair(given.sequences, pi[rows, scored], mu[rows, drawn], entropy_pi=-(np.exp(pi) * pi).sum(axis=1))


@pytest.mark.parametrize(("temperature", "words"), [(0.6, "sharper"), (0.8, "sharper"), (1.3, "flatter")])
@pytest.mark.parametrize("seed", range(2))
def test_a_temperature_that_neither_sides_log_probs_have_is_seen_by_the_entropy(
    temperature: float, words: str, seed: int
) -> None:
    given = world(seed=seed, num_sequences=160)
    [cause] = signatures(disagreement(given, scored_tokens(given, temperature), Dtype.BF16))
    assert cause.code == Code.TEMPERATURE
    assert cause.sentence.endswith(f"but from a {words} one.")


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_drawn_from_what_is_recorded_have_no_other_temperature(spread: float, seed: int) -> None:
    given = world(seed=seed, spread=spread)
    for pair in (scored_tokens(given), replace(scored_tokens(given), entropy_pi=None)):
        assert signatures(disagreement(given, pair, Dtype.BF16)) == []


def test_other_weights_are_no_other_temperature_of_sampling() -> None:
    """Tokens of mu are not drawn from pi, and their surprise says nothing."""
    given = world()
    moved = with_logits(given, Dtype.BF16, pi=given.logits + given.generator.normal(size=given.logits.shape))
    assert sampled_otherwise(moved) is None


def test_scores_of_other_tokens_are_told_by_the_entropy() -> None:
    given = world()
    pair = scored_tokens(given, others=True)
    [cause] = signatures(disagreement(given, pair, Dtype.BF16))
    assert cause.code == Code.LABEL_OFFSET
    assert cause.sentence == "The training path scores other tokens than the engine sampled."
    assert label_offset(disagreement(given, replace(pair, entropy_pi=None), Dtype.BF16)) is None
