"""A deviation at places congruent modulo a block is named with block, phase and side, from the log alone too."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Ints, Sequences, TokenPair
from mismatch_probe.verdict.signatures.places import OUTSTANDING, period, period_of
from mismatch_probe.verdict.signatures.profile import Disagreement
from tests.verdict import simulated

BF16 = Dtype.BF16


def bf16_world(seed: int = 0, num_tokens: int = 300, prompt: int = 0) -> simulated.World:
    given = simulated.world(48, num_tokens, prompt=prompt, seed=seed)
    prompts = given.generator.integers(5, 90, 48) if not prompt else given.prompt_lengths
    return replace(given, prompt_lengths=prompts)


def with_seams(
    given: simulated.World, block: int, phase: int, nats: float, side: str, *, has_reference: bool = True
) -> Disagreement:
    """One side's logits are off by `nats` at the seams, rounding elsewhere."""
    is_seam = (given.places.astype(int) - 1) % block == phase
    off = given.generator.normal(size=given.logits.shape) * nats * is_seam[:, None]
    disagreement = simulated.with_logits(given, BF16, **{side: given.logits + off})
    disagreement = replace(disagreement, is_settled=False)
    if has_reference:
        return disagreement
    return replace(disagreement, pair=replace(disagreement.pair, log_ref=None), floor=1e-6)


@pytest.mark.parametrize("side", ["pi", "mu"])
@pytest.mark.parametrize("nats", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("block", "phase"), [(16, 0), (24, 18), (64, 63), (96, 17), (128, 1)])
def test_block_phase_and_side_are_named(block: int, phase: int, nats: float, side: str) -> None:
    disagreement = with_seams(bf16_world(), block, phase, nats, side)
    seams = period_of(disagreement)
    assert seams is not None
    assert (seams.block, seams.phase) == (block, phase)
    cause = period(disagreement)
    assert cause is not None
    assert cause.code == Code.PERIOD
    who = {"pi": "The training path", "mu": "The engine"}[side]
    assert cause.sentence.startswith(f"{who} errs once in every {block} places of the context, at {phase} ")


@pytest.mark.parametrize("nats", [0.3, 1.0, 3.0])
def test_a_log_alone_names_block_and_phase(nats: float) -> None:
    seams = period_of(with_seams(bf16_world(1), 64, 5, nats, "pi", has_reference=False))
    assert seams is not None
    assert (seams.block, seams.phase) == (64, 5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("side", "who"), [("pi", "One side"), ("mu", "The engine")])
def test_a_log_alone_names_an_engine_whose_log_prob_falls_and_no_trainer(side: str, who: str, seed: int) -> None:
    """Tokens that an engine samples from what it computes wrongly are unlikely for a sound trainer too."""
    disagreement = with_seams(bf16_world(seed), 32, 5, 4.0, "pi", has_reference=False)
    pair = disagreement.pair
    if side == "mu":
        disagreement = replace(
            disagreement, pair=replace(pair, log_pi=pair.log_mu, log_mu=pair.log_pi, entropy_pi=None)
        )
    cause = period(disagreement)
    assert cause is not None
    assert cause.sentence.startswith(f"{who} errs")
    assert ("the checkpoint says which" in cause.evidence[-1]) == (side == "pi")


def with_noise_of_few_tokens(disagreement: Disagreement) -> Disagreement:
    """One token in 50 is off by nats on one side, as where responses were sampled under weights that the log does not
    name; as a mean square this is the floor.
    """
    random = np.random.default_rng(3)
    size = disagreement.pair.diff.shape
    noise = np.where(random.random(size) < 0.02, random.normal(0, 3.0, size), 0.0)
    noisy = changed(disagreement, disagreement.pair.diff + noise)
    return replace(noisy, floor=0.4, rounding=1e-6)


def test_noise_of_a_few_tokens_hides_no_period() -> None:
    noisy = with_noise_of_few_tokens(with_seams(bf16_world(2), 64, 5, 0.3, "pi"))
    seams = period_of(noisy)
    assert seams is not None
    assert (seams.block, seams.phase) == (64, 5)


@pytest.mark.parametrize("seed", range(6))
def test_noise_of_a_few_tokens_is_no_period(seed: int) -> None:
    assert period_of(with_noise_of_few_tokens(clean(seed))) is None


def clean(seed: int, **kind: int) -> Disagreement:
    return simulated.clean(bf16_world(seed, **kind), BF16)


@pytest.mark.parametrize("seed", range(6))
def test_rounding_has_no_period(seed: int) -> None:
    assert period_of(clean(seed)) is None


def changed(disagreement: Disagreement, diff: Floats) -> Disagreement:
    pair: TokenPair = disagreement.pair
    log_pi = np.minimum(pair.log_mu + diff, 0.0).astype(np.float32)
    return replace(disagreement, pair=replace(pair, log_pi=log_pi, log_ref=None))


@pytest.mark.parametrize("seed", range(4))
def test_tails_first_tokens_fixed_places_and_repeated_text_have_none(seed: int) -> None:
    disagreement = clean(seed, prompt=37)
    random, sequences = np.random.default_rng(seed), disagreement.pair.sequences
    heavy = random.standard_t(1.5, sequences.num_tokens) * 0.01
    assert period_of(changed(disagreement, heavy)) is None
    rounding, own = random.normal(0, 0.01, sequences.num_tokens), sequences.positions
    for is_off in (own == 0, own == 91, own >= 128, own % 5 == 0, own % 7 == 0):
        assert period_of(changed(disagreement, rounding + is_off * random.normal(0, 1.0, sequences.num_tokens))) is None


def test_responses_to_one_prompt_have_none_since_their_text_may_repeat() -> None:
    disagreement = with_seams(bf16_world(), 64, 63, 1.0, "pi")
    sequences = replace(disagreement.pair.sequences, clusters=np.zeros(48, int))
    assert period_of(replace(disagreement, pair=replace(disagreement.pair, sequences=sequences))) is None


def test_few_tokens_have_none() -> None:
    given = simulated.world(2, 40)
    assert period_of(with_seams(replace(given, prompt_lengths=np.zeros(2, int)), 16, 0, 3.0, "pi")) is None


def test_exact_zeros_elsewhere_and_a_few_places_that_are_off_are_named() -> None:
    sequences = Sequences.of_lengths(np.full(12, 300))
    log_mu = -np.random.default_rng(0).gamma(1.0, 1.5, sequences.num_tokens) - 0.2
    diff = np.where(sequences.positions % 128 == 127, -0.5, 0.0)
    pair = TokenPair(sequences, log_pi=log_mu + diff, log_mu=log_mu)
    seams = period_of(Disagreement(pair, BF16, BF16, floor=1e-6))
    assert seams is not None
    assert (seams.block, seams.phase) == (128, 127)


MANY_LENGTHS = np.random.default_rng(7).integers(40, 100, 24)


def with_prompts(lengths: Ints, seed: int, times: Callable[[Ints, Ints], Floats], tokens: int = 96) -> Disagreement:
    """Responses behind prompts of these lengths. Rounding of a token, sure or unsure, has Student's law, times what
    `times` makes of its place in the context and in the response.
    """
    random = np.random.default_rng(seed)
    sequences = Sequences.of_lengths(np.full(lengths.size, tokens), np.arange(lengths.size))
    log_mu = -random.gamma(0.6, 1.5, sequences.num_tokens) - 1e-4
    rounding = 0.02 * random.standard_t(5, log_mu.size) * -np.expm1(log_mu)
    own = sequences.positions.astype(np.int64)
    diff = rounding * times(own + sequences.spread(lengths), own)
    pair = TokenPair(sequences, log_pi=np.minimum(log_mu + diff, -1e-9), log_mu=log_mu)
    return Disagreement(pair, BF16, BF16, floor=1e-6, prompt_lengths=lengths)


def of_form(times: float) -> Callable[[Ints, Ints], Floats]:
    """Lines of 16 tokens."""
    return lambda places, own: np.where(own % 16 == 3, times, 1.0)


def even(places: Ints, own: Ints) -> Floats:
    return np.ones(places.size)


@pytest.mark.parametrize(
    "lengths",
    [np.full(24, 60), np.where(np.arange(24) % 2, 60, 64), 60 + 16 * (np.arange(24) % 5), MANY_LENGTHS],
    ids=["one length", "two lengths", "lengths congruent to each other", "many lengths"],
)
def test_lines_of_a_form_are_no_period(lengths: Ints) -> None:
    """Tokens that stand at the same place of each line may round twice as far as others of which the model is as
    sure.
    """
    for seed in range(6):
        assert period_of(with_prompts(lengths, seed, of_form(2.5))) is None


def test_lines_of_a_form_behind_prompts_of_one_length_are_none_below_tenfold() -> None:
    """What is larger is no form; behind prompts of other lengths threefold is asked."""
    form = [with_prompts(np.full(24, 60), seed, of_form(6.7)) for seed in range(4)]
    assert [period_of(log) for log in form] == [None] * 4
    assert period_of(with_prompts(np.full(24, 60), 0, of_form(40.0))) is not None
    assert any(period_of(log, OUTSTANDING) is not None for log in form)


@pytest.mark.parametrize("seed", range(4))
def test_lines_of_one_task_of_two_are_no_period(seed: int) -> None:
    """Each task has prompts of one length; the other task's lines have another form. A block shows in both."""
    lengths = np.where(np.arange(24) % 2, 60, 64)

    def of_one_task(places: Ints, own: Ints) -> Floats:
        return np.where((places - own == 60) & (own % 16 == 3), 6.0, 1.0)

    def of_context(places: Ints, own: Ints) -> Floats:
        return np.where(places % 16 == 3, 6.0, 1.0)

    assert period_of(with_prompts(lengths, seed, of_one_task)) is None
    assert period_of(with_prompts(lengths, seed, of_one_task), OUTSTANDING / 2) is not None
    assert period_of(with_prompts(lengths, seed, of_context)) is not None


@pytest.mark.parametrize("seed", range(4))
def test_forms_of_two_tasks_that_meet_at_a_phase_are_no_period(seed: int) -> None:
    """Prompts of a third length, which are of another task, show it too where a block does."""

    def of_context(times: float) -> Callable[[Ints, Ints], Floats]:
        return lambda places, own: np.where(places % 16 == 3, times, 1.0)

    two, three = np.where(np.arange(24) % 2, 60, 69), np.array([60, 65, 69])[np.arange(24) % 3]
    assert period_of(with_prompts(two, seed, of_context(4.0))) is None
    assert period_of(with_prompts(three, seed, of_context(4.0))) is not None
    assert period_of(with_prompts(two, seed, of_context(8.0))) is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_form_of_most_prompts_is_no_period_among_many_others(seed: int) -> None:
    lengths = np.concatenate([np.full(28, 60), np.random.default_rng(seed).integers(20, 141, 12)])

    def of_most(places: Ints, own: Ints) -> Floats:
        return np.where((places - own == 60) & (own % 16 == 3), 6.7, 1.0)

    assert period_of(with_prompts(lengths, seed, of_most)) is None
    assert period_of(with_prompts(lengths, seed, of_most), OUTSTANDING) is not None
    assert period_of(with_prompts(lengths, seed, lambda places, own: np.where(places % 16 == 3, 6.7, 1.0))) is not None


def test_other_prompts_that_show_nothing_elsewhere_seldom_make_a_form_a_period() -> None:
    """Their texts are sure but for one place of each line, so that hardly anything tells whether these stand out."""
    lengths = np.where(np.arange(48) % 2, 60, 64)

    def of_one_task(places: Ints, own: Ints) -> Floats:
        return np.where((places - own == 60) & (places % 16 == 3), 6.0, 1.0)

    def with_sure_texts(seed: int) -> Disagreement:
        log = with_prompts(lengths, seed, of_one_task, tokens=400)
        places = log.places - 1
        is_sure = (places - log.pair.sequences.positions == 64) & (places % 16 != 3)
        rounding = 2e-6 * np.random.default_rng(seed).standard_normal(places.size)
        log_mu = np.where(is_sure, -1e-4, log.pair.log_mu)
        log_pi = np.minimum(log_mu + np.where(is_sure, rounding, log.pair.diff), -1e-9)
        return replace(log, pair=replace(log.pair, log_mu=log_mu, log_pi=log_pi))

    assert sum(period_of(with_sure_texts(seed)) is None for seed in range(6)) >= 4


def test_too_short_a_context_has_no_block() -> None:
    assert period_of(with_prompts(np.full(40, 3), 0, even, tokens=12)) is None
