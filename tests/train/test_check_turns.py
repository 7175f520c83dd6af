"""Weights are compared and probed in so few steps that it takes no more than its share; without a bound, in all."""

from itertools import pairwise
from pathlib import Path

import pytest

from mismatch_probe.train.distributed import CheckTurns, Clock
from tests.train.quick_runs import guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")
DOUBTS = 'name = "doubts"\nrule = "limit"\nmetric = "reward/mean"\nbelow = 2\npatience = 99\nactions = ["rollback"]\n'


def checked(max_cost: float | None, check_seconds: float, other_seconds: float, steps: int = 200) -> list[int]:
    """The steps that are checked."""
    turns, found = CheckTurns(max_cost), []
    for step in range(1, steps + 1):
        is_due = turns.is_due(in_doubt=False)
        found += [step] if is_due else []
        turns.took(other_seconds + check_seconds * is_due, check_seconds if is_due else None)
    return found


@pytest.mark.parametrize("max_cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("check_seconds", [0.1, 0.5, 3.0])
def test_checks_take_no_more_than_their_share_and_no_turn_is_left_out_that_they_may_have(
    max_cost: float, check_seconds: float
) -> None:
    steps = checked(max_cost, check_seconds, 1.0)
    [interval] = {later - step for step, later in pairwise(steps)}
    assert check_seconds <= max_cost * (interval + check_seconds) * (1 + 1e-9)
    assert interval == 1 or check_seconds > max_cost * (interval - 1 + check_seconds)


@pytest.mark.parametrize("max_cost", [None, 0.5])
def test_cheap_checks_are_made_in_every_step(max_cost: float | None) -> None:
    assert checked(max_cost, 0.1, 1.0, 20) == list(range(1, 21))


def test_a_step_that_a_guard_doubts_is_checked_whatever_it_costs() -> None:
    turns = CheckTurns(0.01)
    turns.took(1.0, 0.9)
    assert not turns.is_due(in_doubt=False)
    assert turns.is_due(in_doubt=True)


def test_seconds_that_are_moved_are_counted_once() -> None:
    clock = Clock()
    clock.seconds |= {"sync": 3.0, "probe": 1.0}
    clock.move(2.0, "sync", "digest")
    found = clock.metrics(1)
    assert [found[f"time/{phase}_seconds"] for phase in ("sync", "probe", "digest")] == [1.0, 1.0, 2.0]


@pytest.mark.slow
def test_a_bound_on_their_cost_leaves_checks_out_and_learns_the_same(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    free, bound = (
        train(home / name, quick_settings(llama, home, 12, checks={"max_cost": cost}))
        for name, cost in (("free", None), ("bound", 1e-4))
    )
    assert ["sync/probe_k3" in step for step in free] == [True] * 12
    assert ["sync/probe_k3" in step for step in bound] == [True] + [False] * 11
    assert all("update/policy_shift_k3" not in step for step in bound[1:])
    assert [step["optim/grad_norm"] for step in free] == [step["optim/grad_norm"] for step in bound]
    assert [step["reward/mean"] for step in free] == [step["reward/mean"] for step in bound]


@pytest.mark.slow
def test_while_a_guard_doubts_every_step_is_checked(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    guards = guard_file(home, DOUBTS)
    steps = train(home / "run", quick_settings(llama, home, 4, checks={"max_cost": 1e-4}, guards=guards))
    assert all("sync/probe_k3" in step for step in steps)
