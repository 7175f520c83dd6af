"""Would the guards have fired here? It plants faults in copies of a user's batch, and lists the guards that fire."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mismatch_probe.arrays import Layout, as_numbers
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.answers import Decision, text_table
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.inputs import kind_of_value
from mismatch_probe.guards.rewards import RewardTotals
from mismatch_probe.guards.sums import Sums
from mismatch_probe.stats.sequences import Floats

SOUND_STEPS: Final = 10
"""As many as the slowest default guard learns its level from, and some."""
FAULTY_STEPS: Final = 5

_TEMPERATURE: Final = 0.7
_HARMLESS: Final = (ActionKind.LOG, ActionKind.WARN)
_OTHER_WEIGHTS_NATS: Final = 0.5
_SCALE: Final = 1e6
_LOST_OF: Final = 10

FloatRows = list[Floats]
Decide = Callable[[Sums], Decision]


@dataclass(frozen=True)
class PlantedFault:
    """One fault over `FAULTY_STEPS` steps, counted from the first."""

    fault: str
    guards: tuple[str, ...]
    """Those that fired and had not on the batch as it is."""
    seen_at: int | None
    """`seen_at`, `withheld_at` and `stopped_at`: the step at which the first of them fired, the first whose update the
    loop would not have applied, and that at which the run would have ended; None where it did not come to that.
    """
    withheld_at: int | None
    stopped_at: int | None


@dataclass(frozen=True)
class SelfTest:
    """What guards say of a batch as it is, and of each fault planted in it. Prints as a table."""

    as_given: tuple[str, ...]
    """The guards that fire on the batch as it is."""
    broken_by: tuple[str, ...]
    """Those of them that ask for more than a warning. Such a batch hides what is planted in it, so nothing was."""
    planted: tuple[PlantedFault, ...]

    def __iter__(self) -> Iterator[PlantedFault]:
        """
        Raises:
            UsageError: the batch is broken.
        """
        if self.broken_by:
            raise UsageError(self._sentence)
        return iter(self.planted)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Faults that no guard fired on.

        Raises:
            UsageError: the batch is broken.
        """
        return tuple(row.fault for row in self if row.seen_at is None)

    @property
    def _sentence(self) -> str:
        if self.broken_by:
            return (
                f"the batch is broken as it is: {', '.join(self.broken_by)} would fire on it, so no fault was planted "
                "and nothing is known of any; give a sound batch"
            )
        return f"on the batch as it is: {', '.join(self.as_given) or 'no guard'}"

    def __str__(self) -> str:
        if self.broken_by:
            return self._sentence
        rows = [
            (row.fault, *map(_step, (row.seen_at, row.withheld_at, row.stopped_at)), ", ".join(row.guards) or "none")
            for row in self.planted
        ]
        return f"{self._sentence}\n\n{text_table(COLUMNS, rows)}"


COLUMNS: Final = ("planted fault", "seen at step", "update withheld", "run stopped", "guards that fire")


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def run_self_test(batch: Batch, new_run: Callable[[], Decide]) -> SelfTest:
    """`new_run` starts guards that know nothing yet, and gives what takes a step's sums to their decision.

    Raises:
        UsageError: the batch lacks a side's log-probs, or has no token, so there is nothing to plant faults in.
    """
    if not isinstance(batch, Batch):
        raise UsageError(f"a self-test needs a Batch, not {kind_of_value(batch)}: give Batch(log_pi, log_mu, mask)")
    if batch.log_pi is None or batch.log_mu is None:
        raise UsageError("a self-test plants faults in log-probs: give a batch with log_pi and log_mu")
    sound = batch.measure()
    if not sound.compared:
        raise UsageError("no token of the batch counts, so there is nothing to plant faults in: look at its mask")
    if sound.is_copied:
        raise UsageError(
            "one side of the batch is a copy of the other, so its mismatch is not measured and no fault would show: "
            "give log-probs that each side computed"
        )
    judge = new_run()
    events = [event for _ in range(SOUND_STEPS) for event in judge(sound).events]
    as_given = {event.guard for event in events}
    broken_by = {event.guard for event in events if any(action.kind not in _HARMLESS for action in event.actions)}
    faults = () if broken_by else _faults(batch)
    return SelfTest(
        tuple(sorted(as_given)),
        tuple(sorted(broken_by)),
        tuple(_plant(fault, batch_copy.measure(), sound, as_given, new_run()) for fault, batch_copy in faults),
    )


def _plant(fault: str, faulty: Sums, sound: Sums, as_given: set[str], judge: Decide) -> PlantedFault:
    for _ in range(SOUND_STEPS):
        judge(sound)
    decisions = {step: judge(faulty) for step in range(1, FAULTY_STEPS + 1)}
    guards_by_step = {
        step: [event.guard for event in decision.events if event.guard not in as_given]
        for step, decision in decisions.items()
    }
    return PlantedFault(
        fault,
        tuple(dict.fromkeys(guard for guards in guards_by_step.values() for guard in guards)),
        _first(step for step, guards in guards_by_step.items() if guards),
        _first(step for step, decision in decisions.items() if guards_by_step[step] and decision.skip),
        _first(step for step, decision in decisions.items() if guards_by_step[step] and decision.stop),
    )


def _first(steps: Iterator[int]) -> int | None:
    return next(steps, None)


def _faults(batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Each named, in a copy of the batch, which has both sides."""
    assert batch.log_pi is not None
    assert batch.log_mu is not None
    layout = Layout.of(batch.log_pi, batch.mask, "log_pi", batch.log_mu, batch.entropy)
    ends = np.cumsum(layout.lengths)[:-1]
    random = np.random.default_rng(0)

    def rows(values: Floats) -> FloatRows:
        return np.split(values, ends)

    log_pi, log_mu = (layout.log_probs(side, "a side", "log_pi") for side in (batch.log_pi, batch.log_mu))
    entropy = None if batch.entropy is None else layout.flat(batch.entropy, "entropy", "log_pi")
    batch_copy = replace(
        batch, log_pi=rows(log_pi), log_mu=rows(log_mu), mask=None, entropy=None if entropy is None else rows(entropy)
    )
    noise = _OTHER_WEIGHTS_NATS * random.standard_normal(log_mu.size) * -np.expm1(log_mu)
    yield (
        f"log-probs of mu at temperature {_TEMPERATURE:g}",
        replace(batch_copy, log_mu=rows(_at_temperature(log_mu, entropy))),
    )
    yield "labels shifted by one token", replace(batch_copy, log_pi=[np.roll(row, 1) for row in rows(log_pi)])
    yield "responses paired with others", replace(batch_copy, log_pi=rows(np.roll(log_pi, log_pi.size // 2)))
    yield "an engine with other weights", replace(batch_copy, log_mu=rows(np.minimum(log_mu + noise, 0.0)))
    is_lost = np.arange(log_mu.size) % _LOST_OF == 0
    yield (
        f"one in {_LOST_OF} log-probs of mu is NaN",
        replace(batch_copy, log_mu=rows(np.where(is_lost, np.nan, log_mu))),
    )
    yield "log-probs of mu not recorded, 0 each", replace(batch_copy, log_mu=rows(np.zeros_like(log_mu)))
    yield "log-probs of mu copied from pi's", replace(batch_copy, log_mu=rows(log_pi))
    copies = [np.concatenate([of_mu[:1], of_pi[1:]]) for of_pi, of_mu in zip(rows(log_pi), rows(log_mu), strict=True)]
    yield "log-probs of mu copied but for each first token", replace(batch_copy, log_mu=copies)
    yield "a mask that leaves no token", replace(batch_copy, mask=rows(np.zeros_like(log_mu)))
    if batch.rewards is not None and not isinstance(batch.rewards, RewardTotals):
        rewards = as_numbers(layout.of_rows(batch.rewards, "rewards"))
        yield "one reward is NaN", replace(batch_copy, rewards=_with_nan(rewards))
        yield f"rewards times {_SCALE:g}", replace(batch_copy, rewards=rewards * _SCALE)


def _at_temperature(log_mu: Floats, entropy: Floats | None) -> Floats:
    """To first order in 1 / T - 1 (`stats.temperature`); without entropies their mean stands for each."""
    entropies: Floats | float = -float(log_mu.mean()) if entropy is None else entropy
    return np.asarray(np.minimum(log_mu + (1 / _TEMPERATURE - 1) * (log_mu + entropies), 0.0))


def _with_nan(values: Sequence[float] | Floats) -> Floats:
    result = np.array(values, dtype=np.float64)
    result[0] = np.nan
    return result
