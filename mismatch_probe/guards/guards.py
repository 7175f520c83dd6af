"""The guards of a training loop, whoever's loop it is: give them what a step gave, and do what they decide.

    guards = Guards.default(can={"skip", "stop"})
    decision = guards.observe(Batch(log_pi, log_mu, mask, entropy=entropy, rewards=rewards, prompt_ids=prompt_ids))
    if decision.stop: ...

On several ranks each measures its own responses, the arrays are gathered, and every rank decides the same:

    rows = gather(batch.measure().to_array())          # [ranks, K]
    decision = guards.observe(Sums.of_arrays(rows))
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Self

from mismatch_probe.errors import UsageError
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.inputs import flag_of, probes_of, step_of, sums_of, update_metrics_of
from mismatch_probe.guards.judging import StepJudge
from mismatch_probe.guards.plausible import tell_of_base, tell_of_left_out
from mismatch_probe.guards.probe import Probe
from mismatch_probe.guards.rewards import NEW
from mismatch_probe.guards.rules import DEFAULT_GUARDS, load_guards
from mismatch_probe.guards.self_test import Decide, SelfTest, run_self_test
from mismatch_probe.guards.sums import Metrics, Sums
from mismatch_probe.reading import Unreadable, as_path


class Guards(StepJudge):
    """The guards of a loop: measure a step's responses, judge them, and check what the loop gives."""

    @classmethod
    def default(cls, can: Iterable[str] = ()) -> Self:
        """The default guards of docs/guards.md.

        Args:
            can: The actions that the loop can carry out, as for the constructor.

        Raises:
            UsageError: There is no such action.
        """
        return cls(DEFAULT_GUARDS, can)

    @classmethod
    def from_file(cls, path: str | Path, can: Iterable[str] = ()) -> Self:
        """The guards that a guard file asks for.

        Args:
            path: The guard file.
            can: The actions that the loop can carry out, as for the constructor.

        Raises:
            UsageError: The file cannot be read, or something in it cannot be used.
        """
        try:
            return cls(load_guards(as_path(path)), can)
        except Unreadable as error:
            raise UsageError(f"no guard file can be read: {error}") from error

    def observe(
        self,
        batch: Batch | Sums | None = None,
        *,
        step: int | None = None,
        probe: Probe | Sequence[Probe] | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        loss_scale: float | None = None,
        metrics: Mapping[str, float | None] | None = None,
        canary: bool | None = None,
    ) -> Decision:
        """Take in one step before its update is applied, and decide what the loop does with it.

        The first step says which guards are on; the others are counted in one warning. An input that a later step
        lacks is named once.

        Args:
            batch: The step's responses, or their sums over all ranks.
            step: Its number, counted from 1; one after the last unless given.
            probe: Log-probs of a few fixed tokens on both sides after the weights were sent; of several engines one
                each.
            loss: The loss of this update.
            grad_norm: The norm of its gradient, before clipping.
            learning_rate: The learning rate of this update.
            loss_scale: The loss scale of FP16, where a scaler leaves out a gradient that is not finite; without one
                such a gradient is a fault.
            metrics: Any others by name (docs/train-metrics.md); None is absent.
            canary: Whether both sides hold the same weights, just sent and not updated since; unless given, they do at
                the first step observed.

        Raises:
            UsageError: The arrays do not fit together, an input is of another kind or below 0 where it cannot be, the
                batch holds nothing, or the step is no whole number after the last one. Guards are then as they were.
        """
        is_canary = self._last_step is None if canary is None else flag_of(canary, "canary")
        probes = probes_of(probe)
        sums = sums_of(batch, is_first=self._last_step is None)
        update = self._update_metrics(
            {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "loss_scale": loss_scale}, metrics
        )
        number = self._step_number(step)
        own, withheld = ({}, ()) if sums is None else self._entropies.metrics_of(sums)
        values = (self._probed_engines.take(probes) if probes else {}) | own | update
        warnings = tell_of_left_out(number, sums, self._warned_of)
        self._warned_of = tell_of_base(number, sums, self._entropies.base, warnings)
        return self.judge(number, values, canary=is_canary, withheld=withheld)

    def observe_update(
        self,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        loss_scale: float | None = None,
        metrics: Mapping[str, float | None] | None = None,
    ) -> Decision:
        """Take in a later update of the step that was observed last, before it is applied.

        For guards that read nothing but these inputs it is one more step; the others are left out.

        Args:
            loss: The loss of this update.
            grad_norm: The norm of its gradient, before clipping.
            learning_rate: The learning rate of this update.
            loss_scale: The loss scale of FP16, as in `observe`.
            metrics: Any others by name, as in `observe`.

        Raises:
            UsageError: No step was observed, or an input is no number, or below 0 where it cannot be.
        """
        if self._last_step is None:
            raise UsageError("there is no step that this update belongs to: call observe first")
        update = self._update_metrics(
            {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "loss_scale": loss_scale}, metrics
        )
        return self.judge_update(self._last_step, update)

    def self_test(self, batch: Batch) -> SelfTest:
        """Which of these guards would have fired here: faults planted in copies of a sound batch, each in a run of its
        own. Nothing of it is remembered.

        Args:
            batch: A sound step of the loop, with the log-probs of both sides.

        Raises:
            UsageError: The batch lacks a side's log-probs, or its arrays do not fit together.
        """

        def new_run() -> Decide:
            guards = Guards(self._settings, can=self._can)
            steps = count(1)

            def judge(sums: Sums) -> Decision:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # `explain` lists the guards that are off
                    return guards.observe(sums, step=next(steps), metrics=NEW)

            return judge

        return run_self_test(batch, new_run)

    def _update_metrics(
        self, inputs: Mapping[str, float | None], metrics: Mapping[str, float | None] | None
    ) -> Metrics:
        last = self._history[-1][1] if self._history else {}
        return update_metrics_of(inputs, metrics, overflows=last.get("optim/overflows_in_a_row", 0.0))

    def _step_number(self, step: int | None) -> int:
        following = 1 if self._last_step is None else self._last_step + 1
        number = following if step is None else step_of(step)
        if number < following:
            reason = "is before the first" if self._last_step is None else f"comes after step {self._last_step}"
            raise UsageError(f"step {number} {reason}: steps count upwards from 1, and each is observed once")
        return number
