"""Log-probs to another base than e are named, with the column and the base; temperatures and cuts are none."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.stats.bases import BaseSums, EntropySums, OtherBase, base_of_entropies, base_of_sides
from mismatch_probe.stats.sequences import TokenPair
from mismatch_probe.verdict.signatures import signatures
from mismatch_probe.verdict.signatures.sampling import other_base
from tests.verdict.simulated import World, disagreement, log_softmax, noisy, pair_of, with_logits, world

BITS, TENTHS = 1 / math.log(2), 1 / math.log(10)


def logged(given: World, *, pi: float = 1.0, mu: float = 1.0, entropy: float | None = 1.0) -> TokenPair:
    """Both sides in BF16 without a reference, and columns times these factors."""
    pair = pair_of(given, noisy(given, Dtype.BF16), noisy(given, Dtype.BF16))
    assert pair.entropy_pi is not None
    return replace(
        pair,
        log_ref=None,
        log_pi=pair.log_pi * np.float32(pi),
        log_mu=pair.log_mu * np.float32(mu),
        entropy_pi=None if entropy is None else pair.entropy_pi * entropy,
    )


@pytest.mark.parametrize(
    ("factors", "column", "base"),
    [
        ({"pi": BITS}, "The training path's", "base 2 (bits)"),
        ({"pi": BITS, "entropy": None}, "The training path's", "base 2 (bits)"),
        ({"pi": TENTHS}, "The training path's", "base 10"),
        ({"mu": BITS}, "The engine's", "base 2 (bits)"),
        ({"mu": TENTHS, "entropy": None}, "The engine's", "base 10"),
        ({"pi": BITS, "mu": BITS}, "The log-probs of both sides", "base 2 (bits)"),
        ({"pi": TENTHS, "mu": TENTHS}, "The log-probs of both sides", "base 10"),
    ],
)
def test_a_column_in_another_base_is_named(factors: dict[str, Any], column: str, base: str) -> None:
    given = world()
    [cause] = signatures(disagreement(given, logged(given, **factors), Dtype.BF16))
    assert cause.code == Code.OTHER_BASE
    assert cause.sentence.startswith(column)
    assert base in cause.sentence
    assert f"ln {2 if 'bits' in base else 10} = " in cause.advice[0]


@pytest.mark.parametrize("entropy", [1.0, BITS, TENTHS])
def test_entropies_in_another_base_accuse_nobody(entropy: float) -> None:
    given = world()
    assert not signatures(disagreement(given, logged(given, entropy=entropy), Dtype.BF16))


@pytest.mark.slow
@pytest.mark.parametrize("spread", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("ratio", [math.log(2), math.log(10), BITS, TENTHS, 0.6, 1.2])
def test_a_temperature_of_that_ratio_is_a_temperature(ratio: float, spread: float) -> None:
    given = world(spread=spread)
    deviations = with_logits(given, Dtype.BF16, mu=given.logits / ratio)
    assert other_base(deviations) is None
    assert signatures(deviations)[0].code == Code.TEMPERATURE


@pytest.mark.slow
@pytest.mark.parametrize("kept", [5, 22, 35])
def test_a_cut_to_as_few_tokens_of_a_flat_policy_is_no_base(kept: int) -> None:
    """log 50 / log 22 is 1.27, over log 35 is 1.1, over log 5 is 2.43: nearly ln 10."""
    for spread in (0.05, 0.3, 1.0):
        given = world(spread=spread)
        rank = np.argsort(np.argsort(-given.logits, axis=1), axis=1)
        pair = pair_of(given, noisy(given, Dtype.FP32), noisy(given, Dtype.FP32), kept=(rank < kept).astype(np.float64))
        assert base_of_sides(pair.log_pi, pair.log_mu) is None


@pytest.mark.slow
@pytest.mark.parametrize("spread", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("temperature", [0.3, 0.5, 1.2, 1.3, 1.5, 2.0, 3.0])
def test_tokens_drawn_at_another_temperature_put_no_side_in_another_base(temperature: float, spread: float) -> None:
    for seed in range(4):
        given = world(num_sequences=24, spread=spread, seed=seed)
        log_p = log_softmax(given.logits)
        drawn = (log_softmax(given.logits / temperature) + given.generator.gumbel(size=log_p.shape)).argmax(axis=1)
        entropy = -(np.exp(log_p) * log_p).sum(axis=1)
        base = base_of_entropies(log_p[np.arange(drawn.size), drawn], entropy)
        assert base is None or base.column == "entropy"


def test_sums_of_parts_are_those_of_the_whole() -> None:
    given = world()
    pair = logged(given, pi=BITS)
    assert pair.entropy_pi is not None
    cut = pair.log_pi.size // 3
    parts = [slice(0, cut), slice(cut, None), slice(0, 0)]
    sides = sum((BaseSums.of(pair.log_pi[part], pair.log_mu[part]) for part in parts), BaseSums())
    entropies = sum((EntropySums.of(pair.log_pi[part], pair.entropy_pi[part], 0.5) for part in parts), EntropySums())
    assert sides.base == OtherBase("log_pi", 2)
    sums_of_all = EntropySums.of(pair.log_pi, pair.entropy_pi, 0.5)
    np.testing.assert_allclose(entropies.halves, sums_of_all.halves)
    assert (entropies.likely, entropies.below, entropies.base) == (
        sums_of_all.likely,
        sums_of_all.below,
        sums_of_all.base,
    )
    assert sums_of_all.base == OtherBase("both", 2)


@pytest.mark.parametrize("count", [20, 63, 64, 500])
def test_sides_of_other_distributions_are_known_by_few_tokens_that_tell(count: int) -> None:
    """A third of the tokens is alike under another temperature, and nine in ten between two right sides."""
    log_mu = -np.linspace(0.2, 5, count)
    for num_alike, differ in ((count // 3, True), (9 * count // 10, False)):
        off = np.where(np.arange(count) < num_alike, 1.0, 1.5)
        assert BaseSums.of(off * log_mu, log_mu).differ == differ
    assert not BaseSums.of(log_mu[:3], 2 * log_mu[:3]).differ


def test_few_tokens_tell_no_base() -> None:
    given = world(num_sequences=1, num_tokens=40)
    assert not signatures(disagreement(given, logged(given, entropy=BITS), Dtype.BF16))
    pair = logged(given, pi=BITS)
    assert base_of_sides(pair.log_pi, pair.log_mu) is None
