"""The training loop: sync, sample, score, measure, learn, ask the guards, and only then step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from mismatch_probe.config.train import TrainSettings
from mismatch_probe.errors import TrainingStopped
from mismatch_probe.guards.answers import Decision
from mismatch_probe.guards.diagnosis import StepFirings
from mismatch_probe.guards.guards import Guards
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.host import release_freed_memory
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.distributed import CheckTurns, Clock, as_first_rank_has_it
from mismatch_probe.train.learner import Adjustments, PolicyScores, plan_step, rows_of_update, sequence_ratios
from mismatch_probe.train.objectives.losses import LossPlan
from mismatch_probe.train.parts import TrainingParts, correction_metrics, response_metrics, value_metrics
from mismatch_probe.train.rollouts import Rollout

_RELEASE_EVERY: Final = 16
_REWARDS_OF_A_CHECKPOINT: Final = 4
"""A checkpoint's reward is the mean of so many steps: the first with its weights, the others with slightly newer ones.
"""

StepListener = Callable[[int, Mapping[str, float], StepFirings], None]


class Goal(Protocol):
    """A condition that ends a run before its last step; every rank makes the same calls."""

    def begin(self, parts: TrainingParts, step: int) -> None:
        """Called once the parts exist and the engine has the first checkpoint's weights; `step` was the last step."""

    def reached(self, step: int, rollouts: Sequence[Rollout]) -> bool:
        """Whether the run may end after a step with these responses."""


@dataclass(frozen=True)
class PreparedStep:
    """One update up to its gradients; `state_before` is the optimizers' small state before them."""

    number: int
    rollouts: list[Rollout]
    scores: PolicyScores
    plan: LossPlan
    state_before: dict[str, Any]
    metrics: Metrics


class Trainer:
    """Runs the steps of a training, counted from 1, on assembled parts; `listener` is called for each on every rank."""

    def __init__(
        self,
        parts: TrainingParts,
        settings: TrainSettings,
        guards: Guards,
        checkpoints: Checkpoints,
        adjustments: Adjustments,
        listener: StepListener,
        goal: Goal | None = None,
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._guards = guards
        self._checkpoints = checkpoints
        self.adjustments = adjustments
        self._listener = listener
        self._goal = goal
        self._step = 0
        self._last_saved = 0
        self._rewards_by_step: dict[int, list[float]] = {}
        self._turns = CheckTurns(settings.checks.max_cost)

    def resume(self, step: int) -> None:
        """Continue after the checkpoint of `step`."""
        rest = self._checkpoints.load(step, self._parts.updater.trained)
        with self._checkpoints.restoring(step):
            self._parts.updater.restore(rest["optimizers"])
            self._parts.sync.restore(rest["sync"])
            self._guards.load_state_dict(rest["guards"])
        self._step = self._last_saved = step
        self._rewards_by_step = self._checkpoints.earned()

    def run(self) -> bool:
        """Train to the last step or the goal; False where a guard asked for another precision: that takes new parts.

        Raises:
            TrainingStopped: a guard ended the run.
        """
        if self._goal is not None:
            self._goal.begin(self._parts, self._step)
        if self._step == 0:
            self._save_checkpoint()
        while self._step < self._settings.steps:
            self._step += 1
            precisions = self.adjustments.train_dtype, self.adjustments.infer_dtype
            decision, rollouts = self._run_step(self._step)
            if self._step % _RELEASE_EVERY == 0:
                release_freed_memory()
            has_reached_goal = self._goal is not None and self._goal.reached(self._step, rollouts)
            asks_for_another = (self.adjustments.train_dtype, self.adjustments.infer_dtype) != precisions
            if self._is_checkpoint_due(decision) or has_reached_goal or asks_for_another:
                self._save_checkpoint()
            if has_reached_goal:
                return True
            if asks_for_another:
                return False
        return True

    def _is_checkpoint_due(self, decision: Decision) -> bool:
        """Whether a checkpoint is due at this step.

        It is due at the last step and at every `checkpoint.every`-th step. Where a guard gave up that step or may still
        roll it back, it is due at the first later step without such a doubt.
        """
        every = self._settings.checkpoint.every
        its_turn_came = self._step // every > self._last_saved // every
        is_doubted = decision.gives_up or self._guards.doubted_since is not None
        return (its_turn_came and not is_doubted) or self._step == self._settings.steps

    def _run_step(self, step: int) -> tuple[Decision, list[Rollout]]:
        """Run one step: the decision of the guards and the responses."""
        clock = Clock()
        metrics = self._sync_weights(clock)
        step_data = self._prepare_step(step, clock)
        num_tokens = sum(rollout.length for rollout in step_data.rollouts)
        with clock("measure"):
            metrics |= self._measure_step(step, step_data)
        with clock("reward"):
            metrics |= self._parts.rollouts.repeat_rewards(step, step_data.rollouts)
        metrics |= as_first_rank_has_it(clock.metrics(num_tokens))
        with clock("guards"):
            decision = self._guards.judge(step, metrics, canary=step == 1)
        metrics |= decision.metrics
        update_metrics, decision = self._run_updates(decision, step_data, clock)
        metrics |= update_metrics
        metrics |= clock.metrics(num_tokens)
        self._note_cost(metrics)
        good = self._rollback_step(decision)
        if good is not None and not decision.stop:
            metrics["guards/rolled_back_to"] = float(good)
        self._credit_reward(metrics["reward/mean"])
        self._guards.add(metrics)
        self._listener(step, metrics, decision.firings)
        self._act_on_decision(decision)
        return decision, step_data.rollouts

    def _sync_weights(self, clock: Clock) -> Metrics:
        """Send the weights, and compare and probe them where that is due."""
        sync, is_due = self._parts.sync, self._turns.is_due(in_doubt=self._guards.doubted_since is not None)
        with clock("sync"):
            sync.send(with_digests=is_due)
        if not is_due:
            return {}
        with clock("probe"):
            metrics = sync.verify()
        clock.move(sync.sent_digest_seconds, "sync", "digest")
        clock.move(sync.held_digest_seconds, "probe", "digest")
        return metrics

    def _note_cost(self, metrics: Metrics) -> None:
        """Record the time of the step, which is the first rank's on every rank."""
        if self._turns.max_cost is None:
            return
        seconds = as_first_rank_has_it(
            {name: metrics.get(f"time/{name}_seconds", math.nan) for name in ("step", "probe", "digest")}
        )
        check = seconds["probe"] + seconds["digest"]
        self._turns.took(seconds["step"], None if math.isnan(check) else check)

    def _prepare_step(self, step: int, clock: Clock) -> PreparedStep:
        with clock("sample"):
            rollouts = self._parts.rollouts.sample(step - 1)
        clock.seconds["reward"] = self._parts.rollouts.reward_seconds
        with clock("score"):
            scores = self._parts.updater.score(rollouts, keep_graph=self._settings.rollout.updates == 1)
        return self._compute_gradients(0, rollouts, scores, clock)

    def _compute_gradients(
        self, number: int, rollouts: list[Rollout], scores: PolicyScores, clock: Clock
    ) -> PreparedStep:
        """Compute the gradients of one of the step's updates, counted from 0."""
        with clock("learn"):
            plan = plan_step(self._settings, self.adjustments, rollouts, scores)
            state_before = self._parts.updater.small_state()
            rows = rows_of_update(self._settings, len(rollouts), number)
            update_metrics = self._parts.updater.accumulate(plan.update(rows), rollouts, rows, scores)
        return PreparedStep(number, rollouts, scores, plan, state_before, update_metrics)

    def _measure_step(self, step: int, step_data: PreparedStep) -> Metrics:
        scores = step_data.scores
        return {
            **response_metrics(step_data.rollouts, scores.log_pi_T, scores.entropy_T, self._parts.rollouts.ends),
            **correction_metrics(step_data.plan),
            **value_metrics(step_data.plan),
            **step_data.metrics,
            **self._parts.updater.learning_rates(step, self.adjustments.learning_rate_factor),
        }

    def _apply_adjustments(self, decision: Decision, step_data: PreparedStep, clock: Clock) -> PreparedStep:
        """Apply what guards change; where it changes this update, its gradients are computed again."""
        old = self.adjustments
        ratios = sequence_ratios(step_data.rollouts, step_data.scores)
        for action in decision.actions:
            self.adjustments = self.adjustments.answering(action, ratios)
        self.adjustments = self.adjustments.with_rate_raised(decision.raised)
        has_changed = (old.correction, old.sequence_bound) != (
            self.adjustments.correction,
            self.adjustments.sequence_bound,
        )
        if not has_changed or decision.gives_up:
            return step_data
        self._parts.updater.discard()
        self._parts.updater.restore(step_data.state_before)
        return self._compute_gradients(step_data.number, step_data.rollouts, step_data.scores.without_graphs(), clock)

    def _run_updates(self, decision: Decision, step_data: PreparedStep, clock: Clock) -> tuple[Metrics, Decision]:
        """Run the step's updates: their combined metrics, with those of the probe after a resync, and the decision.

        Guards judge the metrics of each update after the first before it is applied; one that they give up ends the
        step.
        """
        update_metrics, resync_metrics, last_decision = [], Metrics(), decision
        while True:
            step_data = self._apply_adjustments(decision, step_data, clock)
            update_metrics.append(step_data.metrics)
            if decision.resync:
                with clock("sync"):
                    sync_metrics = self._parts.sync()
                resync_metrics = {
                    f"re{name}": value for name, value in sync_metrics.items() if name.startswith("sync/")
                }
            gives_up = decision.gives_up
            with clock("update"):
                if gives_up:
                    self._parts.updater.discard()
                else:
                    self._parts.updater.step(decision.step, self.adjustments.learning_rate_factor)
            if gives_up or step_data.number + 1 == self._settings.rollout.updates:
                return _mean_metrics(update_metrics) | resync_metrics, last_decision
            scores = step_data.scores.without_graphs()
            step_data = self._compute_gradients(step_data.number + 1, step_data.rollouts, scores, clock)
            with clock("guards"):
                decision = self._guards.judge_update(decision.step, step_data.metrics)
            last_decision = last_decision.followed_by(decision)

    def _act_on_decision(self, decision: Decision) -> None:
        """Carry out the actions of guards that go beyond this update."""
        good = self._rollback_step(decision)
        if good is not None and not decision.stop:
            self._parts.sync.restore(self._checkpoints.load(good, self._parts.updater.trained)["sync"])
            self._guards.went_back(good)
            self._last_saved = good
            self._rewards_by_step = {step: rewards for step, rewards in self._rewards_by_step.items() if step < good}
        if good is not None:
            self._checkpoints.forget_after(good)
        if decision.stop:
            raise TrainingStopped(str(self._guards.diagnosis()))

    def _rollback_step(self, decision: Decision) -> int | None:
        """The newest good checkpoint, where a guard rolls back or stops a run that was rolled back before; else None.

        Later weights are in doubt, and a resumed run must not continue from them.
        """
        in_doubt = decision.rollback or (decision.stop and self._guards.doubted_since is not None)
        return self._checkpoints.newest_until(decision.last_good_step) if in_doubt else None

    def _credit_reward(self, reward: float) -> None:
        """Credit the reward of a step to the newest checkpoint, whose weights, or little newer ones, earned it."""
        rewards = self._rewards_by_step.setdefault(self._last_saved, [])
        if math.isfinite(reward) and len(rewards) < _REWARDS_OF_A_CHECKPOINT:
            rewards.append(reward)

    def _save_checkpoint(self) -> None:
        rest: dict[str, Any] = {
            "step": self._step,
            "optimizers": self._parts.updater.small_state(),
            "sync": self._parts.sync.state(),
            "guards": self._guards.state_dict(),
            "last_good_step": self._guards.last_good_step,
            "adjustments": self.adjustments.as_json(),
            "earned": {str(step): rewards for step, rewards in self._rewards_by_step.items()},
        }
        self._last_saved = self._step
        parts = self._parts
        self._checkpoints.save(self._step, parts.updater.trained, parts.policy, parts.tokenizer, rest)


def _mean_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Combine the metrics of a step's updates: the mean of shares and losses, the largest norm, the last scale.

    Counts of what is not finite are the largest of all updates, as norms are.
    """
    mean = dict(parts[-1])
    for name in mean:
        values = [update[name] for update in parts]
        if name.endswith(("loss", "clipped_share")):
            mean[name] = float(np.mean(values))
        elif name.endswith(("grad_norm", "nonfinite_gradients", "overflow")):
            mean[name] = float(np.max(values))
    return mean
