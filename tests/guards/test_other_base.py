"""Log-probs in another base than e are named so by guards, and temperatures never are."""

import json
import math
import warnings
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.diagnosis import Diagnosis
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.plausible import EntropyBase
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
    complete_batch = in_base(2, "log_pi")
    rows = [
        Batch([np.asarray(complete_batch.log_pi)[row][kept]], [np.asarray(complete_batch.log_mu)[row][kept]]).measure()
        for row, kept in enumerate(np.asarray(complete_batch.mask))
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


def seen_in(steps: Iterable[Batch | Sums]) -> tuple[set[str], set[str]]:
    """The guards that fired, and what was warned of a base."""
    guards, fired = Guards.default(can={"skip", "stop"}), set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            fired |= {event.guard for event in guards.observe(step, **LEARNT).events}
    return fired, {str(warning.message) for warning in caught if "logarithms to base" in str(warning.message)}


@pytest.mark.parametrize(
    ("names", "looks"), [(("entropy",), "entropy looks"), (("log_pi", "log_mu"), "log_pi and log_mu look")]
)
def test_entropies_in_bits_of_steps_with_few_tokens_stop_nothing_and_are_named(
    names: tuple[str, ...], looks: str
) -> None:
    fired, warned = seen_in(in_base(2, *names, step=step) for step in range(1, 9))
    assert fired == set()
    (sentence,) = warned
    assert sentence.startswith(f"{looks} like logarithms to base 2 (bits) (by the tokens up to step ")


def test_entropies_in_bits_of_ranks_with_few_tokens_stop_nothing_and_are_named() -> None:
    ranks = [in_base(2, "entropy", step=seed).measure() for seed in range(1, 17)]
    fired, warned = seen_in(sum(ranks[first + 1 : first + 4], ranks[first]) for first in (0, 4, 8, 12))
    assert fired == set()
    assert len(warned) == 1


def test_entropies_that_come_in_bits_in_the_middle_of_a_run_are_named() -> None:
    fired, warned = seen_in(in_base(2, *(["entropy"] if step > 9 else []), step=step) for step in range(1, 25))
    assert fired == set()
    assert len(warned) == 1


def test_a_sampler_at_another_temperature_whose_log_probs_hide_it_is_no_base_by_several_steps() -> None:
    def hidden(step: int) -> Batch:
        drawn = batch(step, temperature=1.5)
        return replace(drawn, log_mu=np.asarray(drawn.log_pi) + 1e-3 * np.sin(np.arange(40)) * np.asarray(drawn.mask))

    fired, warned = seen_in(map(hidden, range(1, 9)))
    assert "sampling" in fired
    assert warned == set()


def test_sums_over_steps_go_with_the_state_and_stay_few() -> None:
    seen, totals = EntropyBase(), batch(1).measure().bases
    for _ in range(400):
        seen.take(totals)
    assert 100 <= sum(steps for steps, _ in seen.blocks) < 256
    assert len(seen.blocks) <= 24


def test_restored_guards_know_the_base_until_the_entropies_are_in_nats() -> None:
    seen, bases = EntropyBase(), []
    for step in range(1, 20):
        seen.take(in_base(2, *(["entropy"] if step < 9 else []), step=step).measure().bases)
        seen = EntropyBase.of_state(json.loads(json.dumps(seen.state())))
        bases.append(seen.base and (seen.base.column, seen.base.base))
    assert bases[:2] == [None, None]
    assert bases[4:9] == [("entropy", 2)] * 5
    assert bases[-4:] == [None] * 4
    assert not seen.is_open


def test_a_base_is_named_at_a_step_whose_tokens_are_too_few_to_tell_it() -> None:
    few = in_base(10, "log_pi", step=3)
    steps = [
        in_base(10, "log_pi", step=1),
        in_base(10, "log_pi", step=2),
        replace(few, mask=np.asarray(few.mask) & (np.arange(40) < 2)),
    ]
    assert steps[2].measure().metrics()["mismatch/base_pi"] == 0
    seen = diagnosis(*steps)
    assert seen is not None
    assert seen.cause is EndCause.OTHER_BASE
