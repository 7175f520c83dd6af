"""A deviation from one place of the context on is named with the place and the side, from the log alone too."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats import curves
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair
from mismatch_probe.verdict.signatures import places as signature
from mismatch_probe.verdict.signatures.places import OUTSTANDING, Onset, onset, onset_of
from mismatch_probe.verdict.signatures.profile import Disagreement
from mismatch_probe.verdict.signatures.sampling import truncated_support
from tests.verdict import simulated
from tests.verdict.simulated import of_texts, texts

BF16 = Dtype.BF16


def bf16_world(seed: int = 0, *, responses: int = 48, prompt: int = 0, tokens: int = 300) -> simulated.World:
    made = simulated.world(responses, tokens, prompt=prompt, seed=seed)
    lengths = made.generator.integers(5, 90, responses) if not prompt else made.prompt_lengths
    return replace(made, prompt_lengths=lengths)


def with_onset(
    made: simulated.World, place: int, nats: float, side: str, *, has_reference: bool = True
) -> Disagreement:
    """One side's logits are off by `nats` from a place of the context, from 0, on."""
    places = made.places.astype(int) - 1
    off = made.generator.normal(size=made.logits.shape) * nats * (places >= place)[:, None]
    disagreement = simulated.with_logits(made, BF16, **{side: made.logits + off})
    disagreement = replace(disagreement, is_settled=False)
    if has_reference:
        return disagreement
    return replace(disagreement, pair=replace(disagreement.pair, log_ref=None), floor=1e-6)


@pytest.mark.parametrize("side", ["pi", "mu"])
@pytest.mark.parametrize("nats", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("place", [97, 129, 257])
def test_place_and_side_are_named(place: int, nats: float, side: str) -> None:
    disagreement = with_onset(bf16_world(), place, nats, side)
    reading = onset_of(disagreement)
    assert reading is not None
    assert reading.first_possible <= place <= reading.place
    cause = onset(disagreement)
    assert cause is not None
    assert cause.code == Code.ONSET
    who = {"pi": "The training path", "mu": "The engine"}[side]
    assert cause.sentence.startswith(f"{who} departs from place {reading.place} of the context on, as where a sliding")
    assert str(place - 1) in cause.sentence


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nats", [0.3, 1.0, 3.0])
def test_a_log_alone_names_the_place(nats: float, seed: int) -> None:
    reading = onset_of(with_onset(bf16_world(seed), 200, nats, "pi", has_reference=False))
    assert reading is not None
    assert abs(reading.place - 200) <= 2


@pytest.mark.parametrize(("places_before", "is_limit"), [(1, True), (16, True), (17, False), (51, False)])
def test_few_places_before_the_longest_context_look_like_its_limit(places_before: int, *, is_limit: bool) -> None:
    none = np.zeros(1, dtype=bool)
    reading = Onset(
        place=1000 - places_before,
        first_possible=1000 - places_before,
        longest=1000,
        score=9.0,
        times=4.0,
        after=none,
        before=none,
    )
    assert ("before the longest context" in reading.words) == is_limit


@cache
def long_log() -> tuple[simulated.World, TokenPair]:
    made = bf16_world(4, responses=60, tokens=560)
    return made, simulated.clean(made, BF16).pair


@pytest.mark.parametrize("nats", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("side", ["pi", "mu"])
@pytest.mark.parametrize("drafts", [2, 4, 7])
def test_the_last_places_before_the_limit_are_named_and_an_engine_whose_log_prob_falls(
    drafts: int, side: str, nats: float
) -> None:
    """Half of the responses run into the longest context, where the log-probs of one side are too low."""
    longest = 280
    made, pair = long_log()
    lengths = made.sequences.lengths
    ends = made.sequences.spread(made.prompt_lengths + lengths)
    places = made.places.astype(int) - 1
    assert (ends >= longest).mean() > 0.3
    is_there = places < longest
    sequences = pair.sequences.of_usable_tokens(is_there)
    assert sequences is not None
    fall = nats * (places >= longest - drafts) * np.random.default_rng(0).exponential(1.0, places.size)
    legs = {"log_pi": pair.log_pi, "log_mu": pair.log_mu}
    legs[f"log_{side}"] = (legs[f"log_{side}"] - fall).astype(np.float32)
    cut = replace(
        pair,
        sequences=sequences,
        log_ref=None,
        top1_pi=None,
        top1_mu=None,
        entropy_pi=None,
        **{name: leg[is_there] for name, leg in legs.items()},
    )
    kept_rows = np.unique(made.sequences.spread(np.arange(lengths.size))[is_there])
    cause = onset(Disagreement(cut, BF16, BF16, floor=1e-6, prompt_lengths=made.prompt_lengths[kept_rows]))
    assert cause is not None
    assert "before the longest context (280)" in cause.sentence
    assert f"the last {drafts} places" in cause.sentence
    assert cause.sentence.startswith("One side" if side == "pi" else "The engine")


@cache
def clean(seed: int, **kind: int) -> Disagreement:
    return simulated.clean(bf16_world(seed, **kind), BF16)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_has_no_onset(seed: int) -> None:
    assert onset_of(clean(seed)) is None


def changed(disagreement: Disagreement, diff: Floats) -> Disagreement:
    pair = disagreement.pair
    log_pi = np.minimum(pair.log_mu + diff, 0.0).astype(np.float32)
    return replace(disagreement, pair=replace(pair, log_pi=log_pi, log_ref=None))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "shape",
    [
        "tail",
        "first token",
        "grows",
        "grows fast",
        "of the response",
        "of the end",
        "its own place",
        "one token",
        "some",
    ],
)
def test_other_shapes_have_none(seed: int, shape: str) -> None:
    disagreement = clean(seed)
    random, sequences = np.random.default_rng(seed), disagreement.pair.sequences
    count = sequences.num_tokens
    rounding, large = random.normal(0, 0.01, count), random.normal(0, 1.0, count)
    own, places = sequences.positions, disagreement.places
    from_end = sequences.spread(sequences.lengths) - own
    own_places = sequences.spread(random.integers(20, 140, sequences.num_sequences))
    diff = {
        "tail": random.standard_t(1.5, count) * 0.01,
        "first token": rounding + (own == 0) * large,
        "grows": rounding * places**1.5 / 100,
        "grows fast": rounding * np.exp(places / 60),
        "of the response": rounding + (own >= 96) * large,
        "of the end": rounding + (from_end <= 40) * large,
        "its own place": rounding + (own >= own_places) * large,
        "one token": rounding + (places == 150) * large,
        "some": rounding + sequences.spread(random.random(sequences.num_sequences) < 0.3) * large,
    }[shape]
    assert onset_of(changed(disagreement, diff)) is None


@pytest.mark.parametrize("seed", range(3))
def test_what_grows_behind_a_window_is_named_where_it_begins(seed: int) -> None:
    """More and more keys are lost: the deviation is not at its height at once."""
    random, places, _ = texts(seed)
    log_mu = -random.gamma(1.0, 1.0, places.size) - 0.3
    ramp = np.clip((places - 99) / 16, 0, 1)
    diff = random.normal(0, 0.01, places.size) + ramp * random.normal(0, 0.3, places.size)
    reading = onset_of(of_texts(log_mu, diff))
    assert reading is not None
    assert abs(reading.place - 100) <= 4


def times_rounding(seed: int, size: Floats) -> Disagreement:
    """Rounding of unsure texts that is so many times as large at each token."""
    random, places, _ = texts(seed)
    return of_texts(-random.gamma(1.0, 1.0, places.size) - 0.3, random.normal(0, 0.02, places.size) * size)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_doubles_the_deviation_is_named_where_it_is_no_growth(seed: int) -> None:
    """As behind a window that only weakens what lies outside; the same size as growth is none."""
    places = texts(seed)[1]
    reading = onset_of(times_rounding(seed, np.where(places >= 100, 2.0, 1.0)))
    assert reading is not None
    assert reading.times < 3
    assert abs(reading.place - 100) <= 4
    for growth in (
        1 + (places - 30) / 70,
        1 + np.maximum(places - 90, 0) / 20,
        1 + np.minimum((places - 30) / 60, 1),
        1 + np.log(places / 30),
        np.sqrt(places / 30),
    ):
        assert onset_of(times_rounding(seed, growth)) is None
    assert onset_of(times_rounding(seed, np.where(places >= 100, 1.2, 1.0))) is None


def after_prompts(prompts: Ints, seed: int, size: Callable[[Floats], Floats], tokens: int | Ints = 120) -> Disagreement:
    """Responses behind prompts of these lengths, whose rounding has this size at each place."""
    random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.broadcast_to(tokens, prompts.shape))
    places = sequences.positions.astype(np.float64) + sequences.spread(prompts)
    log_mu = -random.gamma(1.0, 1.0, places.size) - 0.3
    diff = random.normal(0, 0.02, places.size) * -np.expm1(log_mu) * size(places)
    pair = TokenPair(sequences, log_pi=np.minimum(log_mu + diff, -1e-9), log_mu=log_mu)
    return Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=prompts)


TWO_LENGTHS = np.where(np.arange(16) % 2, 30, 60)


def test_growth_between_two_levels_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(size: Callable[[Floats], Floats]) -> int:
        return sum(onset_of(after_prompts(TWO_LENGTHS, seed, size)) is not None for seed in range(10))

    ramps: list[Callable[[Floats], Floats]] = [
        lambda places: 1 + ((places - 90) / 40).clip(0, 1),
        lambda places: 1 + 1.8 * ((places - 90) / 40).clip(0, 1),
        lambda places: 1 + 1 / (1 + np.exp((120 - places) / 10)),
    ]
    assert [named(size) for size in ramps] == [0, 0, 0]
    assert named(lambda places: np.where(places >= 100, 2.0, 1.0)) >= 8
    monkeypatch.setattr(curves, "_RAMP", 9999)
    assert sum(named(size) for size in ramps) > 3


@pytest.mark.slow
def test_a_rise_over_forty_places_of_a_long_log_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(20, 80, 16)

    def named(width: float) -> int:
        logs = [
            after_prompts(lengths, seed, lambda places: 1 + ((places - 300) / width).clip(0, 1), 640)
            for seed in range(5)
        ]
        return sum(onset_of(log) is not None for log in logs)

    assert (named(0.5), named(40)) == (5, 0)
    assert named(16) >= 2, "as behind a window"
    monkeypatch.setattr(curves, "_BEFORE_STEP", np.zeros(0))
    assert named(40) > 0


@pytest.mark.parametrize("seed", range(3))
def test_behind_prompts_of_one_length_a_weak_step_may_be_one_of_the_response(seed: int) -> None:
    alike = np.full(16, 40)
    assert onset_of(after_prompts(alike, seed, lambda places: np.where(places >= 100, 2.0, 1.0))) is None
    assert onset_of(after_prompts(alike, seed, lambda places: np.where(places >= 46, 1.0, 0.4))) is None
    assert onset_of(after_prompts(alike, seed, lambda places: np.where(places >= 100, 6.0, 1.0))) is not None
    assert onset_of(after_prompts(TWO_LENGTHS, seed, lambda places: np.where(places >= 100, 2.2, 1.0))) is not None


def at_the_end(lengths: Ints, seed: int, times: float, last: int) -> Disagreement:
    """Responses behind prompts of 40 tokens, whose rounding is so many times as large in the last places before 160."""
    return after_prompts(
        np.full(lengths.size, 40), seed, lambda places: np.where(places >= 160 - last, times, 1.0), lengths
    )


@pytest.mark.parametrize("seed", range(3))
def test_behind_prompts_of_one_length_the_last_places_may_be_how_responses_end(seed: int) -> None:
    """As where all end with like tokens, which round further than others."""
    for lengths in (np.full(48, 120), 119 + np.arange(48) % 2):
        assert onset_of(at_the_end(lengths, seed, 7.5, last=2)) is None
        assert onset_of(at_the_end(lengths, seed, 7.5, last=2), OUTSTANDING) is not None
        assert onset_of(at_the_end(lengths, seed, 40.0, last=2)) is not None
        assert onset_of(at_the_end(lengths, seed, 7.5, last=40)) is not None


@pytest.mark.parametrize("seed", range(3))
def test_how_the_responses_of_one_task_end_is_no_step_behind_other_prompts(seed: int) -> None:
    """The other task's responses do not reach these places. A step that both reach is one."""
    two_tasks = np.where(np.arange(48) % 2, 60, 64)
    ends = after_prompts(two_tasks, seed, lambda places: np.where(places >= 182, 5.2, 1.0))
    assert onset_of(ends) is None
    assert onset_of(ends, OUTSTANDING) is not None
    assert onset_of(after_prompts(two_tasks, seed, lambda places: np.where(places >= 170, 5.2, 1.0))) is not None


@pytest.mark.parametrize("times", [4.0, 9.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_near_the_longest_context_is_one_where_responses_end_at_many_places(seed: int, times: float) -> None:
    lengths = np.random.default_rng(seed).integers(100, 117, 48)
    assert onset_of(at_the_end(lengths + 4, seed, times, last=16)) is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_step_within_the_first_tokens_of_responses_is_named(seed: int) -> None:
    behind_a_window = 119 + np.arange(60) % 9
    assert onset_of(after_prompts(behind_a_window, seed, lambda places: np.where(places >= 128, 10.0, 1.0))) is not None


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("spread", [4, 8, 16])
def test_what_begins_at_a_place_of_the_response_is_none_of_the_context_behind_prompts_nearly_alike(
    spread: int, *, from_end: bool
) -> None:
    for seed in range(3):
        random = np.random.default_rng(seed)
        sequences = Sequences.of_lengths(np.full(24, 120))
        log_mu = -random.gamma(1.0, 1.0, 2880) - 0.3
        is_off = sequences.positions >= (100 if from_end else 50)
        pair = TokenPair(
            sequences, log_pi=log_mu + random.normal(0, 0.01, 2880) * np.where(is_off, 6, 1), log_mu=log_mu
        )
        prompt_lengths = 40 + random.integers(0, spread + 1, 24)
        assert onset_of(Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=prompt_lengths)) is None


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_with_the_same_bits_on_both_sides_are_no_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a prefill computes them as the training path does, in texts that are sure at first."""
    random, sequences = np.random.default_rng(seed), Sequences.of_lengths(np.full(48, 60))
    prompts = np.where(np.arange(48) % 4, 24, 34)
    log_mu = -random.gamma(1.0, 1.0, sequences.num_tokens) - 0.3
    is_alike = (sequences.positions < 5) & (sequences.spread(prompts) == 24)
    diff = random.normal(0, 0.01, sequences.num_tokens) * -np.expm1(log_mu) * ~is_alike
    pair = TokenPair(sequences, log_pi=np.minimum(log_mu + diff, -1e-9), log_mu=log_mu)
    log = Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=prompts)
    assert onset_of(log) is None
    monkeypatch.setattr(signature, "FIRST_TOKENS", 0)
    assert onset_of(log) is not None


def test_responses_to_one_prompt_have_none() -> None:
    disagreement = with_onset(bf16_world(), 129, 1.0, "pi")
    sequences = replace(disagreement.pair.sequences, clusters=np.zeros(48, int))
    assert onset_of(replace(disagreement, pair=replace(disagreement.pair, sequences=sequences))) is None


def test_two_prompts_that_cross_the_place_are_too_few() -> None:
    made = bf16_world(prompt=30)
    disagreement = with_onset(made, 250, 3.0, "pi")
    lengths = disagreement.pair.sequences.lengths
    crossing = np.flatnonzero(lengths + 30 > 250)
    clusters = np.arange(48)
    clusters[crossing] = crossing % 2
    sequences = replace(disagreement.pair.sequences, clusters=clusters)
    assert onset_of(replace(disagreement, pair=replace(disagreement.pair, sequences=sequences))) is None


@pytest.mark.parametrize("place", [40, 120])
@pytest.mark.parametrize("from_place", [True, False])
def test_a_deviation_of_one_sign_from_a_place_on_is_no_cut_vocabulary(place: int, *, from_place: bool) -> None:
    """Of all tokens it looks like one: log-probs fall by less than that of the kept mass, and never rise."""
    made = bf16_world(5)
    is_off = made.places > place if from_place else made.generator.random(made.places.size) < 0.8
    is_sure = simulated.clean(made, BF16).pair.log_mu > -0.5
    diff = -0.15 * (is_off & ~is_sure) * made.generator.uniform(0.5, 1.0, made.places.size)
    assert (truncated_support(changed(clean(5), diff)) is None) == from_place
