"""Log-probs in another base than e are named so by guards, and temperatures never are."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnosis import Diagnosis, EndCause
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.sums import Sums
from tests.guards.steps import LEARNT, batch

pytestmark = pytest.mark.filterwarnings("ignore:guards that are off", "ignore:.*like logarithms to base")
SEEDS = (1, 2, 3, 4)


def in_base(base: int, *names: str, step: int = 1) -> Batch:
    sound = batch(step, noise=0.02)
    return replace(sound, **{name: np.asarray(getattr(sound, name)) / math.log(base) for name in names})


def diagnosis(*steps: Batch | Sums) -> Diagnosis | None:
    guards = Guards.default(can={"skip", "stop"})
    return [guards.observe(step, **LEARNT) for step in steps][-1].diagnosis


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize(("side", "whose"), [("log_pi", "pi's"), ("log_mu", "mu's")])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_a_side_in_another_base_is_named_and_no_temperature(
    base: int, side: str, whose: str, with_entropy: bool
) -> None:
    steps = [in_base(base, side, step=step) for step in (1, 2)]
    steps = steps if with_entropy else [replace(step, entropy=None) for step in steps]
    seen = diagnosis(*steps)
    assert seen is not None
    assert seen.cause is EndCause.OTHER_BASE
    assert seen.sentence.startswith(f"{whose} log-probs are logarithms to base {base}")


@pytest.mark.parametrize("base", [2, 10])
def test_sides_that_are_both_in_another_base_are_told_by_the_entropies_of_all_ranks(base: int) -> None:
    """Each rank has too few tokens to tell."""
    ranks = [in_base(base, "log_pi", "log_mu", step=seed).measure().to_array() for seed in range(1, 9)]
    metrics = Sums.of_arrays(ranks).metrics()
    assert (metrics["mismatch/base_pi"], metrics["mismatch/base_mu"]) == (base, base)
    assert Sums.of_array(ranks[0]).metrics()["mismatch/base_pi"] == 0


def test_a_side_whose_ranks_have_few_tokens_is_told_by_the_sum() -> None:
    whole = in_base(2, "log_pi")
    rows = [
        Batch([np.asarray(whole.log_pi)[row][kept]], [np.asarray(whole.log_mu)[row][kept]]).measure()
        for row, kept in enumerate(np.asarray(whole.mask))
    ]
    assert {rank.metrics()["mismatch/base_pi"] for rank in rows} == {0.0}
    assert sum(rows[1:], rows[0]).metrics()["mismatch/base_pi"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.43, 0.5, 0.6931, 0.8, 1.0, 1.25, 1.4427, 2.0, 2.3026])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_a_temperature_is_never_a_base(temperature: float, noise: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in SEEDS:
            sums = [batch(step, temperature=temperature, noise=noise).measure() for step in (seed, 90 + seed)]
            for step in (*sums, sums[0] + sums[1]):
                metrics = step.metrics()
                assert (metrics["mismatch/base_pi"], metrics["mismatch/base_mu"]) == (0, 0)


def test_entropies_alone_in_another_base_are_no_base_of_a_side() -> None:
    metrics = in_base(2, "entropy").measure().metrics()
    assert (metrics["mismatch/base_pi"], metrics["mismatch/base_mu"]) == (0, 0)
    assert diagnosis(in_base(2, "entropy"), in_base(2, "entropy", step=2)) is None
