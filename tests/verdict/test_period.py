"""A deviation at places congruent modulo a block is named with block, phase and side, from the log alone too."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.sequences import Floats, Sequences, TokenPair
from mismatch_probe.verdict.signatures.places import period, period_of
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
    places = given.places.astype(int) - 1
    off = given.generator.normal(size=given.logits.shape) * nats * (places % block == phase)[:, None]
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
    assert period_of(replace(noisy, rounding=None)) is None, "the noise is the floor of the tokens at the phase too"


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
    rounding, places = random.normal(0, 0.01, sequences.num_tokens), sequences.positions
    for is_off in (places == 0, places == 91, places >= 128, places % 5 == 0, places % 7 == 0):
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
