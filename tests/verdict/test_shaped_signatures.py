"""Causes told apart by where in the context the deviation lies, once it is known that rounding does not explain it."""

from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.results import RoutingCheck
from mismatch_probe.stats.sequences import Floats, Mask
from mismatch_probe.stats.subsamples import routing_check
from mismatch_probe.verdict.judge import judge
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.context import positions, prompt_prefix
from mismatch_probe.verdict.signatures.profile import Disagreement, profile_along
from mismatch_probe.verdict.signatures.weights import routing, stale_weights
from tests.verdict.simulated import World, clean, with_logits, world
from tests.verdict.test_judge import case

SHAPED = (positions, prompt_prefix, stale_weights)
"""Told by where in the context the deviation is; the others come before them."""


def disturbed(given: World, size_at: Floats) -> Disagreement:
    """pi's logits carry errors of this size at each token."""
    return with_logits(given, pi=given.logits + given.generator.normal(size=given.logits.shape) * size_at[:, None])


def behind_prompts(prompt: int, size: float, power: float, *, from_place: int = 1) -> Disagreement:
    """Errors of `size` times place^power from a place on, in responses behind prompts and in the prompts' starts."""
    response, start = world(prompt=prompt), world(num_tokens=60, seed=1)
    parts = []
    for given in (response, start):
        parts.append(disturbed(given, np.where(given.places >= from_place, size * given.places**power, 0.0)))
    deviations, probe = parts
    return replace(deviations, prompt_start=replace(probe, pair=replace(probe.pair, entropy_pi=None)))


@pytest.mark.parametrize("prompt", [10, 300])
def test_errors_that_are_everywhere_alike_are_other_weights(prompt: int) -> None:
    deviations = behind_prompts(prompt, 0.05, 0.0)
    assert [test(deviations) is not None for test in SHAPED] == [False, False, True]
    assert stale_weights(deviations) is not None


def test_prompt_tokens_that_nobody_would_sample_deviate_most_and_hide_no_other_weights() -> None:
    deviations = behind_prompts(300, 0.05, 0.0)
    start = deviations.prompt_start
    assert start is not None
    rare = start.places % 3 == 0
    log_mu = np.where(rare, -9.0, start.pair.log_mu)
    log_pi = log_mu + start.pair.diff * np.where(rare, 6, 1)
    starts = replace(start, pair=replace(start.pair, log_mu=log_mu, log_pi=np.minimum(log_pi, 0)))
    assert stale_weights(replace(deviations, prompt_start=starts)) is not None


@pytest.mark.parametrize("prompt", [10, 300])
def test_errors_that_fade_from_the_start_are_other_text(prompt: int) -> None:
    deviations = behind_prompts(prompt, 0.5, -0.6)
    assert [test(deviations) is not None for test in SHAPED] == [False, True, False]
    assert prompt_prefix(deviations) is not None


@pytest.mark.parametrize("prompt", [10, 300])
def test_errors_that_spare_the_start_and_grow_are_positions(prompt: int) -> None:
    deviations = behind_prompts(prompt, 0.002, 1.0, from_place=2)
    assert [test(deviations) is not None for test in SHAPED] == [True, False, False]


def test_a_first_token_that_is_there_twice_spares_the_first_place_and_fades() -> None:
    deviations = behind_prompts(300, 0.5, -0.6, from_place=2)
    assert [test(deviations) is not None for test in SHAPED] == [False, True, False]


def test_a_first_token_that_is_there_twice_need_not_fade() -> None:
    """As where most attention goes to the first token. The places that are spared are no measure of the others."""
    deviations = behind_prompts(300, 0.5, 0.0, from_place=2)
    assert [test(deviations) is not None for test in SHAPED] == [False, True, False]


def test_weights_that_hardly_move_the_first_place_are_no_other_text() -> None:
    deviations = behind_prompts(10, 0.002, 0.0, from_place=2)
    start = deviations.prompt_start
    assert start is not None
    hardly = 5e-6 * (start.places == 1)
    moved = replace(start, pair=replace(start.pair, log_pi=start.pair.log_pi.astype(np.float64) - hardly))
    assert signatures(replace(deviations, prompt_start=moved)) == []


@pytest.mark.parametrize(("over", "in_responses"), [(10, 1.0), (50, 0.4)])
def test_rotations_set_in_with_distance_and_need_not_grow_for_ever(over: int, in_responses: float) -> None:
    """Short of the place where they are off altogether, little at the start tells them from text."""
    parts = []
    for given, size in ((world(prompt=100), in_responses), (world(num_tokens=60, seed=1), 1.0)):
        parts.append(disturbed(given, 0.3 * size * np.clip((given.places - 1) / over, 0, 1)))
    assert [test(replace(parts[0], prompt_start=parts[1])) is not None for test in SHAPED] == [True, False, False]


def test_other_text_before_few_prompts_shows_at_their_first_places() -> None:
    """Bins of place with few tokens are joined, not left out."""
    response, start = world(12, 16, prompt=20), world(12, 24, seed=1)
    parts = [disturbed(given, 0.05 + 2 * given.places**-1.2) for given in (response, start)]
    deviations = replace(parts[0], prompt_start=parts[1])
    profile = profile_along(parts[1])
    assert profile is not None
    assert profile.centers[0] < 2
    assert prompt_prefix(deviations) is not None


def in_half_of_the_prompts(seed: int, size_in_responses: float, power: float) -> Disagreement:
    """Errors of 0.1 times place^power in the starts of every other prompt, and of another size in their responses."""
    parts = []
    for given, size in (
        (world(12, 24, prompt=50, seed=seed), size_in_responses),
        (world(12, 60, seed=seed + 100), 0.1),
    ):
        is_moved = given.sequences.spread(given.sequences.clusters % 2 == 1)
        parts.append(disturbed(given, np.where(is_moved, size * given.places**power, 0.0)))
    return replace(parts[0], prompt_start=parts[1])


@pytest.mark.parametrize("seed", [1, 7, 8])
def test_sequences_that_a_batch_left_as_they_are_do_not_hide_how_other_text_fades(seed: int) -> None:
    """As with padding that is attended to: the longest sequences have none, and agree from the first place on."""
    deviations = in_half_of_the_prompts(seed, 0.04, -0.1)
    assert [test(deviations) is not None for test in SHAPED] == [False, True, False]
    assert prompt_prefix(replace(deviations, train_dtype=Dtype.BF16)) is None, "as where all sequences count"


@pytest.mark.parametrize("seed", [1, 7, 8])
def test_weights_that_a_part_of_the_sequences_had_are_no_other_text(seed: int) -> None:
    deviations = in_half_of_the_prompts(seed, 0.1, 0.0)
    assert [test(deviations) is not None for test in SHAPED] == [False, False, False]
    verdict = judge(case(deviations, deviations))
    assert verdict.code == Code.UNEXPLAINED
    assert any(line.startswith("6 of 12 prompts agree to rounding: ") for line in verdict.evidence)


def test_a_window_is_named_with_the_place_where_it_ends() -> None:
    cause = positions(behind_prompts(10, 0.1, 0.0, from_place=33))
    assert cause is not None
    assert "up to about token 33" in cause.sentence


def test_without_the_prompts_starts_no_weights_are_blamed() -> None:
    deviations = replace(behind_prompts(300, 0.05, 0.0), prompt_start=None)
    assert signatures(deviations) == []


def test_growth_alone_names_positions_where_the_starts_are_missing() -> None:
    deviations = replace(behind_prompts(10, 0.002, 1.0), prompt_start=None)
    assert positions(deviations) is not None


def test_nothing_shaped_is_named_while_rounding_may_explain_it() -> None:
    deviations = replace(behind_prompts(10, 0.05, 0.0), is_settled=False)
    assert [test(deviations) for test in SHAPED] == [None, None, None]


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP16, Dtype.BF16])
@pytest.mark.parametrize("seed", range(3))
def test_a_settled_pair_within_rounding_has_no_shape(dtype: Dtype, seed: int) -> None:
    deviations = replace(clean(world(seed=seed), dtype), is_settled=True)
    assert [test(deviations) for test in SHAPED] == [None, None, None]


@pytest.mark.slow
def test_the_profile_takes_the_tokens_uncertainty_out() -> None:
    """Logits sharpen along the response, so d shrinks although the errors do not."""
    given = world(num_sequences=200)
    sharper = replace(given, logits=given.logits * (0.2 + given.sequences.positions[:, None] / 20))
    deviations = disturbed(sharper, np.full(given.sequences.num_tokens, 0.01))
    head, tail = (deviations.pair.abs_diff[given.sequences.positions // 20 == part].mean() for part in (0, 3))
    profile = profile_along(deviations)
    assert profile is not None
    assert tail < 0.7 * head
    assert abs(profile.slope) < 0.1


def test_routing_is_the_heavy_tail_of_a_mixture_of_experts() -> None:
    given = world()
    flips = given.generator.random(given.sequences.num_tokens) < 0.005
    deviations = with_logits(
        given, Dtype.BF16, pi=given.logits + flips[:, None] * given.generator.normal(size=given.logits.shape)
    )
    cause = routing(replace(deviations, has_experts=True))
    assert cause is not None
    assert routing(deviations) is None, "a dense model has no routing"
    assert routing(replace(clean(given, Dtype.BF16), has_experts=True)) is None, "no heavy tail, no flips"


def choice(deviations: Disagreement, *others: Mask) -> RoutingCheck:
    """Both sides' choice of experts in layers 2, 3, ..., which differs for these tokens."""
    stacked = np.stack(others)
    layers = range(2, 2 + len(others))
    return routing_check(deviations.pair.sequences, layers, stacked, 0.4 * stacked, deviations.pair.diff)


def test_flips_that_were_recorded_must_be_where_the_deviation_is() -> None:
    given = world()
    flips = given.generator.random(given.sequences.num_tokens) < 0.005
    deviations = with_logits(
        given, Dtype.BF16, pi=given.logits + flips[:, None] * given.generator.normal(size=given.logits.shape)
    )
    deviations = replace(deviations, has_experts=True)
    cause = routing(replace(deviations, routing=choice(deviations, flips)))
    assert cause is not None
    assert "take other experts for" in " ".join(cause.evidence)
    assert routing(replace(deviations, routing=choice(deviations, np.zeros_like(flips)))) is None, "both choose alike"
    elsewhere = np.roll(flips, 50)
    assert not (flips & elsewhere).any()
    assert routing(replace(deviations, routing=choice(deviations, elsewhere))) is None, "d lies elsewhere"
