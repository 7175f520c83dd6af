"""The training loop: sync, sample, score, measure, learn, ask the guards, and only then step."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import TrainingStopped
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.clock import Clock
from mismatch_probe.train.guards.actions import Action, ActionKind
from mismatch_probe.train.guards.book import GuardBook
from mismatch_probe.train.guards.decision import Decision, GuardEvent
from mismatch_probe.train.guards.diagnose import diagnose
from mismatch_probe.train.learner import Accumulated, Scored, rollout_batch
from mismatch_probe.train.measure import Metrics, correction_metrics, mismatch_metrics, reward_metrics
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import Plan, prepare
from mismatch_probe.train.parts import Parts
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.state import Adjustments

_HISTORY_STEPS: Final = 16
_GIVES_UP_UPDATE: Final = frozenset({ActionKind.SKIP_UPDATE, ActionKind.ROLLBACK, ActionKind.STOP})

Listener = Callable[[int, Mapping[str, float], Decision], None]


class Goal(Protocol):
    """What ends a run before its last step; every rank asks it the same."""

    def begin(self, parts: Parts, step: int) -> None:
        """The parts stand, the engine still with the starting checkpoint's weights; `step` is the last one done."""

    def reached(self, step: int, rollouts: Sequence[Rollout]) -> bool:
        """Whether the run may end after a step with these responses."""


@dataclass(frozen=True)
class Prepared:
    """One step up to its gradients."""

    rollouts: list[Rollout]
    scored: Scored
    plan: Plan
    accumulated: Accumulated
    grad_norm: float


class Trainer:
    """Runs steps on assembled parts; steps count from 1. `listener` is told of every step on every rank."""

    def __init__(
        self,
        parts: Parts,
        settings: TrainSettings,
        book: GuardBook,
        checkpoints: Checkpoints,
        adjustments: Adjustments,
        listener: Listener,
        goal: Goal | None = None,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._book = book
        self._checkpoints = checkpoints
        self.adjustments = adjustments
        self._listener = listener
        self._goal = goal
        self._step = 0
        self._recent_rewards: list[float] = []
        self._history: deque[tuple[int, Metrics]] = deque(maxlen=_HISTORY_STEPS)
        self._events: list[GuardEvent] = []

    def resume(self, step: int) -> None:
        """Continue after the checkpoint of `step`."""
        rest = self._checkpoints.load(step, self._parts.policy, self._parts.optimizer)
        self._parts.optimizer.restore(rest["optimizer"])
        self._parts.sync.restore(rest["sync"])
        self._book.restore(rest["guards"])
        self._step = step

    def run(self) -> bool:
        """Train to the last step or the goal. False where a guard asked for another precision: assemble again, go on.

        Raises:
            TrainingStopped: a guard ended the run.
        """
        if self._goal is not None:
            self._goal.begin(self._parts, self._step)
        if self._step == 0:
            self._save()
        while self._step < self._settings.steps:
            self._step += 1
            precisions = self.adjustments.train_dtype, self.adjustments.infer_dtype
            decision, rollouts = self._run_step(self._step)
            reached = self._goal is not None and self._goal.reached(self._step, rollouts)
            due = self._step % self._settings.checkpoint.every == 0 or self._step == self._settings.steps
            asks_for_another = (self.adjustments.train_dtype, self.adjustments.infer_dtype) != precisions
            if (due and not decision.events) or reached or asks_for_another:
                self._save()
            if reached:
                return True
            if asks_for_another:
                return False
        return True

    def _run_step(self, step: int) -> tuple[Decision, list[Rollout]]:
        """One step; what guards said to it, and its responses."""
        clock = Clock()
        with clock("sync"):
            self._parts.sync.send()
        with clock("probe"):
            metrics = self._parts.sync.verify()
        prepared = self._prepare(step, clock)
        with clock("measure"):
            metrics |= self._measured(step, prepared)
        with clock("guards"):
            events = self._book.observe_canary(_without_update(metrics)).events if step == 1 else ()
            judged = self._book.evaluate(step, metrics)
            decision = Decision(step, (*events, *judged.events), judged.missing)
        prepared = self._adjust(decision, prepared, clock)
        if any(action.kind is ActionKind.RESYNC for action in decision.actions):
            with clock("sync"):
                self._parts.sync()
        with clock("update"):
            self._apply(step, decision, prepared)
        metrics |= clock.metrics(sum(rollout.length for rollout in prepared.rollouts))
        self._recent_rewards.append(metrics["reward/mean"])
        self._history.append((step, metrics))
        self._events.extend(decision.events)
        self._listener(step, metrics, decision)
        self._answer(decision)
        return decision, prepared.rollouts

    def _prepare(self, step: int, clock: Clock) -> Prepared:
        with clock("sample"):
            rollouts = self._parts.rollouts.sample(step - 1)
        with clock("score"):
            scored = self._parts.learner.score(rollouts, keep_graph=self._settings.rollout.updates == 1)
        return self._learn(rollouts, scored, clock)

    def _learn(self, rollouts: list[Rollout], scored: Scored, clock: Clock) -> Prepared:
        """The gradients of the step's first update."""
        with clock("learn"):
            plan = self._plan(rollouts, scored)
            accumulated, norm = self._accumulate(plan, rollouts, scored, self._rows_of_update(rollouts, 0))
        return Prepared(rollouts, scored, plan, accumulated, norm)

    def _plan(self, rollouts: list[Rollout], scored: Scored) -> Plan:
        overrides = dict(self._settings.objective.overrides)
        if self.adjustments.correction is not None:
            overrides = {key: value for key, value in overrides.items() if key != "threshold"}
            overrides["correction"] = self.adjustments.correction
        objective = build_objective(self._settings.objective.name, overrides)
        included = self._included(rollouts, scored)
        batch = rollout_batch(rollouts, scored.log_pi_T, included)
        return prepare(objective, batch, self._settings.rollout.max_new_tokens)

    def _included(self, rollouts: list[Rollout], scored: Scored) -> list[bool]:
        """Which responses are in the loss: truncated ones where asked for, those within the bound on abs(S)."""
        masked = self._settings.task.truncated == "masked"
        bound = math.inf if self.adjustments.sequence_bound is None else self.adjustments.sequence_bound
        return [
            not (masked and rollout.truncated) and not ratio > bound
            for rollout, ratio in zip(rollouts, self._sequence_ratios(rollouts, scored), strict=True)
        ]

    def _sequence_ratios(self, rollouts: list[Rollout], scored: Scored) -> list[float]:
        """abs(S) of each response, nats."""
        ends = np.cumsum([rollout.length for rollout in rollouts])[:-1]
        parts = zip(rollouts, np.split(scored.log_pi_T, ends), strict=True)
        return [abs(float((log_pi - rollout.mu_logprobs).sum())) for rollout, log_pi in parts]

    def _rows_of_update(self, rollouts: list[Rollout], update: int) -> list[int]:
        """Whole groups in turn, so that every update sees all samples of its problems."""
        samples, updates = self._settings.rollout.samples, self._settings.rollout.updates
        return [row for row in range(len(rollouts)) if row // samples % updates == update]

    def _accumulate(
        self, plan: Plan, rollouts: list[Rollout], scored: Scored, rows: list[int]
    ) -> tuple[Accumulated, float]:
        optimizer = self._parts.optimizer
        update = plan.update(rows)
        accumulated = self._parts.learner.accumulate(update, rollouts, rows, scored, optimizer.scale)
        return accumulated, optimizer.unscale_and_clip()

    def _measured(self, step: int, prepared: Prepared) -> Metrics:
        optimizer = self._parts.optimizer
        scored = prepared.scored
        return {
            **mismatch_metrics(prepared.rollouts, scored.log_pi_T, scored.entropy_T),
            **reward_metrics(prepared.rollouts, prepared.plan),
            **correction_metrics(prepared.plan),
            "optim/loss": prepared.accumulated.loss,
            "optim/grad_norm": prepared.grad_norm,
            "optim/clipped_share": prepared.accumulated.clipped_share,
            "optim/loss_scale": optimizer.scale,
            "optim/overflow": float(optimizer.overflows_in_a_row > 0),
            "optim/overflows_in_a_row": float(optimizer.overflows_in_a_row),
            "optim/learning_rate": self._learning_rate(step),
        }

    def _learning_rate(self, step: int) -> float:
        return self._parts.optimizer.learning_rate(step) * self.adjustments.learning_rate_factor

    def _adjust(self, decision: Decision, prepared: Prepared, clock: Clock) -> Prepared:
        """Take in what guards change; where it changes this update, its gradients are computed again."""
        before = self.adjustments
        for action in decision.actions:
            self.adjustments = self._adjusted(action, prepared)
        changed = (before.correction, before.sequence_bound) != (
            self.adjustments.correction,
            self.adjustments.sequence_bound,
        )
        if not changed or any(action.kind in _GIVES_UP_UPDATE for action in decision.actions):
            return prepared
        self._parts.optimizer.discard()
        scored = Scored(prepared.scored.log_pi_T, prepared.scored.entropy_T, graph=None)
        return self._learn(prepared.rollouts, scored, clock)

    def _adjusted(self, action: Action, prepared: Prepared) -> Adjustments:
        now = self.adjustments
        match action.kind:
            case ActionKind.LOWER_LEARNING_RATE:
                assert action.factor is not None
                return now.but(learning_rate_factor=now.learning_rate_factor * action.factor)
            case ActionKind.SWITCH_CORRECTION:
                return now.but(correction=action.to)
            case ActionKind.TIGHTEN_SEQUENCES:
                assert action.factor is not None
                largest = max(self._sequence_ratios(prepared.rollouts, prepared.scored))
                return now.but(sequence_bound=action.factor * (now.sequence_bound or largest))
            case ActionKind.RAISE_PRECISION:
                return now.but(**{f"{action.side}_dtype": "fp32"})
            case _:
                return now

    def _apply(self, step: int, decision: Decision, prepared: Prepared) -> None:
        """The optimizer step, and those of the updates after the first."""
        optimizer = self._parts.optimizer
        if any(action.kind in _GIVES_UP_UPDATE for action in decision.actions):
            optimizer.discard()
            return
        norm = prepared.grad_norm
        for number in range(self._settings.rollout.updates):
            if number > 0:
                scored = Scored(prepared.scored.log_pi_T, prepared.scored.entropy_T, graph=None)
                rows = self._rows_of_update(prepared.rollouts, number)
                _, norm = self._accumulate(prepared.plan, prepared.rollouts, scored, rows)
            if math.isfinite(norm):
                optimizer.step(self._learning_rate(step))
            else:
                optimizer.discard()

    def _answer(self, decision: Decision) -> None:
        """What guards ask for beyond this update."""
        kinds = [action.kind for action in decision.actions]
        if ActionKind.STOP in kinds:
            raise TrainingStopped(str(diagnose(dict(self._history), self._events)))
        if ActionKind.ROLLBACK in kinds:
            good = self._checkpoints.back_before(decision.step - 1)
            self._parts.sync.restore(self._checkpoints.load(good, self._parts.policy, self._parts.optimizer)["sync"])

    def _save(self) -> None:
        rewards = [reward for reward in self._recent_rewards if math.isfinite(reward)]
        rest: dict[str, Any] = {
            "step": self._step,
            "optimizer": self._parts.optimizer.small_state(),
            "sync": self._parts.sync.state(),
            "guards": self._book.state(),
            "adjustments": self.adjustments.as_json(),
            "recent_reward": float(np.mean(rewards)) if rewards else None,
        }
        self._recent_rewards = []
        self._checkpoints.save(self._step, self._parts.policy, self._parts.optimizer, self._parts.tokenizer, rest)


def _without_update(metrics: Metrics) -> Metrics:
    """What is known of weights that were just synced, before anything is learnt from them."""
    return {name: value for name, value in metrics.items() if name.startswith(("mismatch/", "sync/"))}
