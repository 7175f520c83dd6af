"""Responses become gradients, with the changes that guards have made since the run began."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, UsageError, message_of
from mismatch_probe.guards.actions import Action, ActionKind
from mismatch_probe.reading import Unreadable, as_object, parse_json
from mismatch_probe.records.files import read_regular_text
from mismatch_probe.records.manifest import first_problem
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gather, world_size
from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import LossPlan, Update, plan_loss, policy_loss
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout, gathered_tokens, micro_batches


@dataclass(frozen=True)
class PolicyScores:
    """The scores of every response on every rank before the update."""

    log_pi_T: Floats
    """The log-probs of pi [T], nats."""
    entropy_T: Floats
    """The entropies of pi [T], nats."""
    graph: torch.Tensor | None
    """This rank's log-probs with their graph, where one micro-batch has them all: the first update reuses them."""
    values_T: Floats | None = None
    """The values of the critic [T]."""
    values_graph: torch.Tensor | None = None
    """This rank's values with their graph, as `graph`."""

    def without_graphs(self) -> Self:
        """The scores for the updates after the first, whose backward pass has consumed the graphs."""
        return replace(self, graph=None, values_graph=None)


@dataclass(frozen=True)
class GradientSums:
    """An update's loss before any scaling, and the share of its kept tokens where the clip cut the gradient."""

    loss: float
    clipped_share: float


class Learner:
    """Scores responses and accumulates gradients; every rank must call the same methods with the same responses."""

    def __init__(self, policy: Policy, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._micro_batch_tokens = micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout], *, keep_graph: bool) -> PolicyScores:
        """The log-probs of the responses under the present pi."""
        batches = micro_batches(rollouts, range(len(rollouts)), self._micro_batch_tokens)
        with_graph = keep_graph and len(batches) == 1
        with torch.set_grad_enabled(with_graph), self._policy.computing():
            passes = [self._policy.logprobs(batch.of(rollouts)) for batch in batches]
        return PolicyScores(
            gathered_tokens(rollouts, batches, [logprobs_T for logprobs_T, _ in passes]),
            gathered_tokens(rollouts, batches, [entropy_T for _, entropy_T in passes]),
            passes[0][0] if with_graph else None,
        )

    def accumulate(
        self, update: Update, rollouts: Sequence[Rollout], rows: Sequence[int], scores: PolicyScores, scale: float
    ) -> GradientSums:
        """Add the gradient of `scale` times the update's loss over `rows` to the parameters.

        FSDP averages over ranks, so each rank's share of the sum counts as often as there are ranks.
        """
        losses, num_clipped, num_kept = 0.0, 0, 0
        with self._policy.computing():
            for batch in micro_batches(rollouts, rows, self._micro_batch_tokens):
                if scores.graph is not None:
                    logprobs_T = scores.graph
                else:
                    logprobs_T, _ = self._policy.logprobs(batch.of(rollouts))
                if batch.is_filler:
                    (logprobs_T.sum() * 0).backward()
                    continue
                result = policy_loss(update, logprobs_T, batch.rows)
                (result.loss * (scale * world_size())).backward()
                losses += float(result.loss.detach())
                num_clipped += int(result.num_clipped)
                num_kept += int(result.num_tokens)
        totals = np.sum(gather([(losses, num_clipped, num_kept)]), axis=0)
        return GradientSums(float(totals[0]), float(totals[1] / max(1, totals[2])))


def rollout_batch(
    rollouts: Sequence[Rollout], log_pi_T: Floats, is_included: Sequence[bool], values_T: Floats | None = None
) -> RolloutBatch:
    """The batch of a step's responses for the objective, on the CPU."""
    groups = np.unique([rollout.prompt_id for rollout in rollouts], return_inverse=True)[1]
    return RolloutBatch(
        rewards_N=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        group_ids_N=torch.from_numpy(groups),
        lengths_N=torch.tensor([rollout.length for rollout in rollouts]),
        included_N=torch.tensor(list(is_included)),
        old_logprobs_T=torch.from_numpy(log_pi_T),
        mu_logprobs_T=torch.from_numpy(np.concatenate([rollout.mu_logprobs for rollout in rollouts])),
        values_T=None if values_T is None else torch.from_numpy(values_T),
    )


@dataclass(frozen=True)
class Adjustments:
    """The changes that guards have made to a run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    learning_rate_factor: float = 1.0
    """A factor of the scheduled learning rate."""
    correction: str | None = None
    """Replaces the correction of the objective."""
    sequence_bound: float | None = None
    """Responses with abs(S) above this bound (nats) are excluded from the loss."""
    train_dtype: Dtype | None = None
    infer_dtype: Dtype | None = None
    """The dtypes replace those of the settings."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_rate_raised(self, by: float) -> Self:
        """The adjustments with a lowered rate multiplied by `by`, and never above the schedule."""
        return self if by == 1 else replace(self, learning_rate_factor=min(1.0, self.learning_rate_factor * by))

    def answering(self, action: Action, ratios: Sequence[float]) -> Self:
        """The adjustments after an action of a guard; `ratios` are abs(S) of the step's responses, nats.

        A bound that would leave less than half of these in the loss is not tightened to, nor one of 0, which any later
        response that rounds otherwise would exceed.
        """
        match action.kind:
            case ActionKind.LOWER_LEARNING_RATE:
                assert action.factor is not None
                return replace(self, learning_rate_factor=self.learning_rate_factor * action.factor)
            case ActionKind.SWITCH_CORRECTION:
                return replace(self, correction=action.to)
            case ActionKind.TIGHTEN_SEQUENCES:
                assert action.factor is not None
                bound = action.factor * (max(ratios) if self.sequence_bound is None else self.sequence_bound)
                return replace(self, sequence_bound=bound) if 0 < bound < math.inf and median(ratios) <= bound else self
            case ActionKind.RAISE_PRECISION:
                in_fp32: dict[str, Any] = {f"{action.side}_dtype": Dtype.FP32}
                return replace(self, **in_fp32)
            case _:
                return self


def plan_step(
    settings: TrainSettings, adjustments: Adjustments, rollouts: Sequence[Rollout], scores: PolicyScores
) -> LossPlan:
    """Plan the loss of a step: the advantages and weights of every response."""
    overrides = dict(settings.objective.overrides)
    if adjustments.correction is not None:
        overrides = {key: value for key, value in overrides.items() if key != "threshold"}
        overrides["correction"] = adjustments.correction
    objective = build_objective(settings.objective.name, overrides)
    is_included = _responses_in_loss(settings, adjustments, rollouts, scores)
    batch = rollout_batch(rollouts, scores.log_pi_T, is_included, scores.values_T)
    return plan_loss(objective, batch, settings.rollout.max_new_tokens)


def sequence_ratios(rollouts: Sequence[Rollout], scores: PolicyScores) -> list[float]:
    """abs(S) of each response, nats."""
    ends = np.cumsum([rollout.length for rollout in rollouts])[:-1]
    parts = zip(rollouts, np.split(scores.log_pi_T, ends), strict=True)
    return [abs(float((log_pi - rollout.mu_logprobs).sum())) for rollout, log_pi in parts]


def rows_of_update(settings: TrainSettings, num_rollouts: int, update: int) -> list[int]:
    """The rows of one update: complete groups, so that every update has all samples of its problems."""
    samples, updates = settings.rollout.samples, settings.rollout.updates
    return [row for row in range(num_rollouts) if row // samples % updates == update]


def _responses_in_loss(
    settings: TrainSettings, adjustments: Adjustments, rollouts: Sequence[Rollout], scores: PolicyScores
) -> list[bool]:
    """The mask of the responses in the loss: their reward is a number, and abs(S) is within the bound.

    Truncated responses are included where the settings say so.
    """
    is_masked = settings.task.truncated == "masked"
    bound = math.inf if adjustments.sequence_bound is None else adjustments.sequence_bound
    return [
        math.isfinite(rollout.reward) and not (is_masked and rollout.truncated) and not ratio > bound
        for rollout, ratio in zip(rollouts, sequence_ratios(rollouts, scores), strict=True)
    ]


_ADJUSTMENTS = TypeAdapter(Adjustments)


class _CheckpointRest(BaseModel):
    """The fields of a checkpoint's document; each part checks its own when it is restored."""

    model_config = ConfigDict(strict=True)

    adjustments: dict[str, Any]
    recent_reward: float | None = None
    earned: dict[str, list[float]] | None = None
    optimizers: dict[str, Any]
    sync: dict[str, Any]
    guards: dict[str, Any]


def read_remembered(path: Path) -> dict[str, Any]:
    """The document as it was written.

    Raises:
        OSError: it is not there, or cannot be read.
        Unreadable: it is damaged, or lacks something.
    """
    rest = as_object(parse_json(read_regular_text(path), constants=True))
    try:
        _CheckpointRest.model_validate(rest)
        adjustments_of(rest)
    except ValidationError as error:
        raise Unreadable(first_problem(error)) from error
    return rest


def adjustments_of(rest: dict[str, Any]) -> Adjustments:
    """Read the adjustments from the document; a ValidationError says what is wrong with it."""
    return _ADJUSTMENTS.validate_json(json.dumps(rest["adjustments"]))


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Names the checkpoint where a part cannot be restored from it.

    Raises:
        BrokenRecord: the content is not what the part wrote.
    """
    try:
        yield
    except UsageError:
        raise
    except (BrokenRecord, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokenRecord(
            f"the checkpoint {path} does not hold what a run goes on with ({type(error).__name__}: {message_of(error)}"
            "); remove it to resume from the one before"
        ) from error
