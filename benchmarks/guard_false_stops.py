"""How often `reward-collapse` is wrong, and how soon it is right, by simulated runs that the default guard judges.

    python -m benchmarks.guard_false_stops [--runs 200] > TABLES

A step draws new prompts and samples of each. Each prompt has a difficulty of its own, drawn from a beta distribution
around the policy's level. A reward is 0 or 1 by that difficulty, or graded: beta-distributed around it. Without a fault
the policy stays at its level, or learns or varies slowly. With one, the rewards fall from step 51 on. What a rollback
would fix is not simulated: the policy goes on as it is. The last table has what a loop with a probe knows besides: a
policy that hardly moves, so that a fall from one step to the next is none of its making, and one over several may be.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool

import numpy as np

from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.stats.sequences import Floats

SHAPES = ((1, 4), (2, 4), (2, 8), (8, 4), (8, 8), (32, 8))
"""Prompts, and samples of each."""
STEPS = 100
ONSET = 51
SPREAD = 2.0
"""Of the prompts' difficulties: a beta distribution with parameters 2p and 2 (1 - p)."""
GRADING = 4.0
WARN, ROLLBACK, STOP = ActionKind.WARN, ActionKind.ROLLBACK, ActionKind.STOP

Level = Callable[[int], float]
"""The policy's mean reward at a step, from 1."""

POLICIES: dict[str, Level] = {
    "stays at 0.25": lambda step: 0.25,
    "stays at 0.5": lambda step: 0.5,
    "stays at 0.75": lambda step: 0.75,
    "learns, 0.2 to 0.8": lambda step: 0.2 + 0.6 * min(1.0, step / 60),
    "waves, 0.6 +- 0.15": lambda step: 0.6 + 0.15 * float(np.sin(2 * np.pi * step / 50)),
}
COLLAPSES: dict[str, Level] = {
    "0.25 to 0": lambda step: 0.25 if step < ONSET else 0.0,
    "0.5 to 0": lambda step: 0.5 if step < ONSET else 0.0,
    "0.75 to 0": lambda step: 0.75 if step < ONSET else 0.0,
    "0.75 to 0.2": lambda step: 0.75 if step < ONSET else 0.2,
    "0.75 to 0 in 20 steps": lambda step: 0.75 * min(1.0, max(0.0, 1 - (step - ONSET + 1) / 20)),
}
CALM: dict[str, Level] = {
    f"{before} to {after} {'at once' if steps == 1 else f'in {steps} steps'}": partial(
        lambda step, before, after, steps: before + (after - before) * min(1.0, max(0.0, (step - ONSET + 1) / steps)),
        before=before,
        after=after,
        steps=steps,
    )
    for before, after in ((0.75, 0.0), (0.75, 0.3))
    for steps in (1, 4, 8, 16)
}
"""Of a policy that is calm by all else that is known of it."""
MOVED = {"update/policy_shift_k3": 1e-5, "policy/entropy": 0.03, "mismatch/kl_k3": 2e-5}
"""As on the demo checkpoint; each step differs by a fifth."""
REWARDS = ("0 or 1", "graded")


@dataclass(frozen=True)
class Design:
    policy: str
    graded: bool
    prompts: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """The first step at which the guard warned, rolled back and stopped; None where it did not."""

    warned: int | None
    rolled_back: int | None
    stopped: int | None


def rewards(design: Design, step: int, random: np.random.Generator) -> Floats:
    """[P, S] of one step."""
    level = (POLICIES | COLLAPSES | CALM)[design.policy](step)
    shape = design.prompts, design.samples
    if not 0 < level < 1:
        return np.full(shape, level)
    difficulty = random.beta(SPREAD * level, SPREAD * (1 - level), (design.prompts, 1)).clip(1e-6, 1 - 1e-6)
    if design.graded:
        return random.beta(GRADING * difficulty, GRADING * (1 - difficulty), shape)
    return (random.random(shape) < difficulty).astype(np.float64)


def outcome(design: Design, run: int) -> Outcome:
    random = np.random.default_rng([23, run])
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "reward-collapse"))
    clusters = np.repeat(np.arange(design.prompts), design.samples)
    first: dict[ActionKind, int] = {}
    for step in range(1, STEPS + 1):
        earned = rewards(design, step, random).ravel()
        for action in book.evaluate(step, RewardTotals.of(earned, clusters, None).metrics()).actions:
            first.setdefault(action.kind, step)
    return Outcome(*(first.get(kind) for kind in (WARN, ROLLBACK, STOP)))


def false_stops(runs: int, pool: Pool) -> Iterator[str]:
    """A line a policy and kind of reward: warned / rolled back / stopped, in percent of runs, for each shape."""
    for policy in POLICIES:
        for kind in REWARDS:
            cells = []
            for prompts, samples in SHAPES:
                design = Design(policy, kind == "graded", prompts, samples)
                ends = pool.map(partial(outcome, design), range(runs), chunksize=20)
                shares = [
                    100 * np.mean([step is not None for step in steps])
                    for steps in zip(*((end.warned, end.rolled_back, end.stopped) for end in ends), strict=True)
                ]
                cells.append(" / ".join(f"{share:.1f}" for share in shares))
            yield f"| {policy} | {kind} | " + " | ".join(cells) + " |"


def power(runs: int, pool: Pool) -> Iterator[str]:
    """A line a collapse: steps from the fall to the warning and to the stop, medians, and the runs stopped by step 100.

    Runs that were warned before the fall are counted with the others, from the first warning after it.
    """
    for policy in COLLAPSES:
        for kind in REWARDS:
            cells = []
            for prompts, samples in SHAPES:
                design = Design(policy, kind == "graded", prompts, samples)
                ends = pool.map(partial(outcome, design), range(runs), chunksize=20)
                stopped = [end.stopped for end in ends if end.stopped is not None and end.stopped >= ONSET]
                warned = [end.warned for end in ends if end.warned is not None and end.warned >= ONSET]
                cells.append(f"{_delay(warned)} / {_delay(stopped)} / {100 * len(stopped) / runs:.0f} %")
            yield f"| {policy} | {kind} | " + " | ".join(cells) + " |"


def calm_outcome(design: Design, run: int) -> Outcome:
    """Under both guards on the mean reward, with what else is known of the policy."""
    random = np.random.default_rng([29, run])
    guards = Guards((guard for guard in DEFAULT_GUARDS if guard.metrics[0] == "reward/mean"), can=list(ActionKind))
    clusters = np.repeat(np.arange(design.prompts), design.samples)
    first: dict[ActionKind, int] = {}
    for step in range(1, STEPS + 1):
        reward_metrics = RewardTotals.of(rewards(design, step, random).ravel(), clusters, None).metrics()
        reward_metrics |= {name: value * float(np.exp(0.2 * random.standard_normal())) for name, value in MOVED.items()}
        for action in guards.judge(step, reward_metrics, canary=False).actions:
            first.setdefault(action.kind, step)
    return Outcome(*(first.get(kind) for kind in (WARN, ROLLBACK, STOP)))


def calm(runs: int, pool: Pool) -> Iterator[str]:
    """A line a fall: warned / rolled back / stopped, in percent of runs."""
    for policy in CALM:
        cells = []
        for prompts, samples in SHAPES:
            ends = pool.map(partial(calm_outcome, Design(policy, False, prompts, samples)), range(runs), chunksize=5)
            shares = [
                100 * np.mean([step is not None for step in steps])
                for steps in zip(*((end.warned, end.rolled_back, end.stopped) for end in ends), strict=True)
            ]
            cells.append(" / ".join(f"{share:.0f}" for share in shares))
        yield f"| {policy} | 0 or 1 | " + " | ".join(cells) + " |"


def _delay(steps: list[int]) -> str:
    return f"{np.median(steps) - ONSET + 1:.0f}" if steps else "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    head = "| policy | reward | " + " | ".join(f"{prompts} x {samples}" for prompts, samples in SHAPES) + " |"
    rule = "|---|---|" + "---|" * len(SHAPES)
    with Pool(options.processes) as pool:
        print(head, rule, sep="\n")
        for line in false_stops(options.runs, pool):
            print(line, flush=True)
        print("", head, rule, sep="\n")
        for line in power(options.runs // 2, pool):
            print(line, flush=True)
        print("", head, rule, sep="\n")
        for line in calm(options.runs // 2, pool):
            print(line, flush=True)


if __name__ == "__main__":
    main()
