"""Whether a side agrees with itself, told from few tokens as from many."""

import numpy as np
import pytest

from mismatch_probe.explain.sentences import RepeatSpread


def repeats(tokens_a_context: list[int], spread: float, residual: float, seed: int) -> RepeatSpread:
    """Of a side that differs from itself by so much, and from the checkpoint by so much in each context."""
    random = np.random.default_rng(seed)
    squares, residuals = [], []
    for size in tokens_a_context:
        values = random.normal(0, residual) + random.normal(0, spread, size)
        squares.append((values - values.mean()) ** 2 * size / (size - 1))
        residuals.append(values**2)
    flat = np.concatenate(squares)
    return RepeatSpread(
        num_tokens=len(flat),
        degrees=len(flat) - len(squares),
        spread_floors=float(np.sqrt(flat.mean())),
        residual_floors=float(np.sqrt(np.concatenate(residuals).mean())),
    )


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[4, 3], [2] * 6, [3] * 20])
def test_randomness_is_told_and_other_weights_are_not_taken_for_it(tokens: list[int]) -> None:
    random, other = (
        [repeats(tokens, spread, residual, seed) for seed in range(200)] for spread, residual in ((20, 0), (0.7, 20))
    )
    assert np.mean([found.disagree for found in random]) > 0.9
    assert np.mean([found.agree for found in random]) < 0.05
    assert not any(found.disagree for found in other)
    assert np.mean([found.agree for found in other]) > 0.8


def test_nothing_is_told_of_a_single_pair() -> None:
    found = repeats([2], 20, 0, 0)
    assert not found.disagree
    assert not found.agree


@pytest.mark.parametrize(("spread", "is_random"), [(150.0, True), (3.0, False)])
def test_scatter_that_no_batch_makes_is_randomness_however_far_the_side_is_off(spread: float, is_random: bool) -> None:
    """Dropout of a tenth moves a model's log-probs by more than it scatters them."""
    off = RepeatSpread(num_tokens=40, degrees=20, spread_floors=spread, residual_floors=466.0)
    assert (off.disagree, off.agree) == (is_random, not is_random)
