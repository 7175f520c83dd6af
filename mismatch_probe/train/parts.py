"""The parts of a training run: policy, optimizer, engine, tasks; the metrics of a step; and the canary."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mismatch_probe import __version__
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.config.train import OptimizerSettings, TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.start import start_engine
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.book import GuardBook, of_canary
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.provenance.checkpoint import end_token_ids
from mismatch_probe.records.sequences import SampleRequest, TokenSequence
from mismatch_probe.records.training_run import SOLVED_FROM, Canary, TrainingDirectory
from mismatch_probe.stats.sequences import Floats, Ints
from mismatch_probe.stats.tails import LOG_BOUND
from mismatch_probe.tasks.reward_calls import RewardLimits
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.distributed import gather, join_process_group, world_size
from mismatch_probe.train.learner import Adjustments
from mismatch_probe.train.objectives.catalogue import build_objective
from mismatch_probe.train.objectives.losses import LossPlan
from mismatch_probe.train.optimizer import Critic, Optimizer, Updater
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.preparation import TrainingPreparation
from mismatch_probe.train.rollouts import Rollout, Rollouts
from mismatch_probe.train.sharded import ValueModel
from mismatch_probe.train.weight_sync import Draws, WeightSync
from mismatch_probe.training_path.arithmetic import CpuProducts, has_native_bf16, native_fp16_follows_the_definition
from mismatch_probe.training_path.loading import choose_device

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PROBE_SEQUENCES: Final = 4
_PROBE_NEW_TOKENS: Final = 16
_PARALLEL_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size")
_GPU_MEMORY_SHARE: Final = 0.4
"""The engine's share of a GPU that it shares with the policy and its optimizer."""


@dataclass(frozen=True)
class TrainingParts:
    policy: Policy
    updater: Updater
    engine: Engine
    rollouts: Rollouts
    sync: WeightSync
    tokenizer: "PreTrainedTokenizerBase"

    def effective(self) -> dict[str, Any]:
        """The effective settings that both sides report."""
        return {"engine": self.engine.effective_settings(), "policy": self.policy.effective_settings()}


@contextmanager
def assemble(preparation: TrainingPreparation, adjustments: Adjustments) -> Iterator[TrainingParts]:
    """Assemble the parts of a run with the adjustments of guards; the engine is closed at the end of the block."""
    settings = preparation.settings
    train_dtype = adjustments.train_dtype or settings.train_dtype
    infer_dtype = adjustments.infer_dtype or settings.infer_dtype
    sampling = SamplingSettings(
        max_new_tokens=settings.rollout.max_new_tokens, temperature=settings.rollout.temperature
    )
    with start_engine(
        str(preparation.folder),
        infer_dtype,
        _settings_of_engine(settings),
        sampling,
        max_model_len=preparation.longest_sequence,
        num_sequences=settings.rollout.prompts * settings.rollout.samples,
        trust_remote_code=settings.model.trust_remote_code,
        seed=settings.seed,
        products=CpuProducts if _engine_uses_policy_products(settings, infer_dtype) else nullcontext,
    ) as engine:
        policy = Policy(
            preparation.folder,
            train_dtype,
            settings.policy,
            temperature=settings.rollout.temperature,
            trust_remote_code=settings.model.trust_remote_code,
            seed=settings.seed,
        )
        if settings.server is not None:  # it may hold whatever an earlier run sent it
            engine.update_weights(policy.weights(infer_dtype))
        probe = _probe_sequences(engine, preparation, sampling)
        updater = Updater(
            policy,
            _make_optimizer(policy, settings, settings.optimizer),
            _make_critic(preparation, train_dtype),
            settings.policy.micro_batch_tokens,
        )
        yield TrainingParts(
            policy=policy,
            updater=updater,
            engine=engine,
            rollouts=Rollouts(
                engine,
                preparation.problems,
                preparation.tokenizer,
                preparation.reward,
                settings.rollout,
                settings.seed,
                _ranks_an_engine(engine),
                RewardLimits(settings.task.reward_workers, settings.task.reward_seconds),
                end_token_ids(preparation.folder, preparation.tokenizer.eos_token_id),
                settings.task.rewards_repeated,
            ),
            sync=WeightSync(
                policy,
                engine,
                infer_dtype,
                probe,
                _ranks_an_engine(engine),
                draws=Draws.of_prompts(
                    engine, policy, sampling, preparation.problems[:_PROBE_SEQUENCES], settings.seed
                ),
            ),
            tokenizer=preparation.tokenizer,
        )


def _make_optimizer(model: Policy | ValueModel, settings: TrainSettings, own: OptimizerSettings) -> Optimizer:
    scale = settings.loss_scale if model.dtype == Dtype.FP16 else None
    return Optimizer(model.trainable(), own, steps=settings.steps, scale=scale)


def _make_critic(preparation: TrainingPreparation, dtype: Dtype) -> Critic | None:
    """The critic of an objective that has one."""
    settings = preparation.settings
    if build_objective(settings.objective.name, settings.objective.overrides).critic is None:
        return None
    model = ValueModel(
        preparation.folder,
        dtype,
        settings.policy,
        trust_remote_code=settings.model.trust_remote_code,
        seed=settings.seed,
    )
    own = settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate})
    return Critic(model, _make_optimizer(model, settings, own), settings.policy.micro_batch_tokens)


def _settings_of_engine(settings: TrainSettings) -> EngineSettings:
    """The engine settings of the user, completed for an engine that shares the device and the process group."""
    if settings.server is not None:
        return settings.sampler
    args = dict(settings.engine.args)
    if choose_device(settings.policy.device).type == "cuda":
        args.setdefault("gpu_memory_utilization", _GPU_MEMORY_SHARE)
    if world_size() > 1:
        args.setdefault("distributed_executor_backend", "external_launcher")
    return settings.engine.model_copy(update={"args": args})


def _ranks_an_engine(engine: Engine) -> int:
    """How many of torchrun's ranks hold one engine together; a server answers each of them alone."""
    effective = engine.effective_settings()
    return 1 if world_size() == 1 else prod(effective.get(name, 1) for name in _PARALLEL_SIZES)


def _engine_uses_policy_products(settings: TrainSettings, dtype: Dtype) -> bool:
    """Whether the engine is to multiply as the policy does: on a CPU without kernels of its own for that dtype."""
    if choose_device(settings.policy.device).type != "cpu":
        return False
    if dtype == Dtype.BF16:
        return not has_native_bf16()
    return dtype == Dtype.FP16 and not native_fp16_follows_the_definition()


def _probe_sequences(
    engine: Engine, preparation: TrainingPreparation, sampling: SamplingSettings
) -> Sequence[TokenSequence]:
    """Responses of the checkpoint itself to the first problems: the same in every run of these settings."""
    problems = preparation.problems[:_PROBE_SEQUENCES]
    requests = [SampleRequest(f"probe/{problem.prompt_id}", problem, 0) for problem in problems]
    shorter = sampling.model_copy(update={"max_new_tokens": min(_PROBE_NEW_TOKENS, sampling.max_new_tokens)})
    return gather([response.sequence for response in engine.sample(requests, shorter)])[: len(problems)]


def response_metrics(
    rollouts: Sequence[Rollout], log_pi: Floats, entropy: Floats, end_tokens: Collection[int] = ()
) -> Metrics:
    """The metrics of a step's responses and rewards, and of pi's log-probs and entropies before the update [T].

    end_tokens: the tokens that end a response, where they are known.
    """
    ends = np.cumsum([rollout.length for rollout in rollouts])[:-1]
    batch = Batch(
        np.split(log_pi, ends),
        [rollout.mu_logprobs for rollout in rollouts],
        entropy=np.split(entropy, ends),
        prompt_ids=[rollout.prompt_id for rollout in rollouts],
        rewards=[rollout.reward for rollout in rollouts],
        truncated=[rollout.truncated for rollout in rollouts],
        in_part=False,
        computed_apart=True,
    )
    is_unended = [not rollout.truncated and rollout.sequence.token_ids[-1] not in end_tokens for rollout in rollouts]
    return {
        **batch.measure().metrics(),
        **_rewards_under_pi(rollouts, log_pi, ends),
        "reward/late": float(sum(rollout.is_late for rollout in rollouts)),
        "response/unended_share": float(np.mean(is_unended)) if end_tokens else 0.0,
    }


def _rewards_under_pi(rollouts: Sequence[Rollout], log_pi: Floats, ends: Ints) -> Metrics:
    """What the responses would earn had pi sampled them: each counts by its weight w = exp(S), and all weights are
    divided by their sum; S is limited to +-20.
    """
    rewards = np.array([rollout.reward for rollout in rollouts])
    log_mu = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    sums = np.array([part.sum() for part in np.split(log_pi - log_mu, ends)])
    is_number = np.isfinite(rewards)
    if not is_number.any():
        return dict.fromkeys(("reward/mean_pi", "reward/solved_share", "reward/solved_share_pi"), math.nan)
    weights = np.exp(np.clip(sums, -LOG_BOUND, LOG_BOUND))[is_number]
    numbers = rewards[is_number]
    is_solved = numbers >= SOLVED_FROM
    return {
        "reward/mean_pi": float(weights @ numbers / weights.sum()),
        "reward/solved_share": float(is_solved.mean()),
        "reward/solved_share_pi": float(weights @ is_solved / weights.sum()),
    }


def correction_metrics(plan: LossPlan) -> Metrics:
    """The metrics of what was excluded from the loss, and of what the correction did to the step's tokens."""
    correction = plan.corrected
    return {
        "correction/excluded_share": float((~plan.batch.included_N).double().mean()),
        "correction/clipped_share": correction.share_clipped,
        "correction/rejected_share": correction.share_rejected,
        "correction/ess": np.nan if correction.ess is None else correction.ess,
    }


def value_metrics(plan: LossPlan) -> Metrics:
    """The metrics of the critic's predictions before the update; none without a critic.

    `critic/explained_variance` is 1 - Var(R - V) / Var(R) over tokens in the loss, with R the returns that the values V
    learn from: 1 is perfect, below 0 is worse than a constant, NaN where all returns are equal.
    """
    if plan.returns_T is None or plan.batch.values_T is None:
        return {}
    included_T = plan.batch.included_T
    returns, values = (given_T[included_T].numpy() for given_T in (plan.returns_T, plan.batch.values_T))
    spread = np.var(returns) if len(returns) else 0.0
    return {
        "critic/explained_variance": float(1 - np.var(returns - values) / spread) if spread > 0 else np.nan,
        "critic/value_mean": float(values.mean()) if len(values) else np.nan,
    }


def hold_canary(preparation: TrainingPreparation, run: TrainingDirectory | None) -> Canary:
    """Judge the newest checkpoint of a run with its guards, or the model itself where there is none."""
    settings = preparation.settings
    join_process_group(choose_device(settings.policy.device))
    checkpoints = None if run is None else Checkpoints(run.checkpoints_path, keep=settings.checkpoint.keep)
    step = 0 if checkpoints is None else max(checkpoints.steps(), default=0)
    has_checkpoint = checkpoints is not None and step in checkpoints.steps()
    adjustments = checkpoints.adjustments(step) if checkpoints is not None and has_checkpoint else Adjustments()
    book = GuardBook(preparation.guards)
    with assemble(preparation, adjustments) as parts:
        if checkpoints is not None and has_checkpoint:
            rest = checkpoints.load(step, parts.updater.trained)
            with checkpoints.restoring(step):
                parts.sync.restore(rest["sync"])
                book.restore(rest["guards"])
        metrics = parts.sync()
        rollouts = parts.rollouts.sample(step)
        scores = parts.updater.score(rollouts, keep_graph=False)
    metrics |= response_metrics(rollouts, scores.log_pi_T, scores.entropy_T)
    canary_metrics = of_canary(metrics)
    return Canary(
        tool_version=__version__,
        model=settings.model.path,
        step=step,
        train_dtype=adjustments.train_dtype or settings.train_dtype,
        infer_dtype=adjustments.infer_dtype or settings.infer_dtype,
        metrics={name: value if math.isfinite(value) else None for name, value in metrics.items()},
        fired=[event.as_json() for event in book.observe_canary(canary_metrics, step).events],
    )
