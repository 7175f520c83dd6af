"""Before anything heavy starts: checkpoint, problems, reward, objective and guards are resolved and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mismatch_probe.config.model import PromptSettings, SamplingSettings
from mismatch_probe.config.train import DEFAULT_NUM_PROBLEMS, TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import check_engine, check_room, with_typed_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.book import GuardBook, of_canary
from mismatch_probe.guards.rules import DEFAULT_GUARDS, load_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.provenance import checkpoint, environment
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.training_run import TrainingManifest
from mismatch_probe.tasks import Asking, check_lengths, encode_prompts, load_prompts, load_tokenizer, resolve_model
from mismatch_probe.tasks.rewards import Reward, load_reward
from mismatch_probe.train.objectives.catalogue import build_objective, require_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NAMES: Final = {
    "mismatch": "kl_k1 kl_k3 abs_logprob_diff abs_logprob_diff_max abs_logprob_diff_seq logprob_diff_rms "
    "token_mult_prob_error prob_abs_diff prob_abs_diff_max prob_diff_max prob_diff_min prob_pearson is_ratio_mean "
    "ess_token ess_seq chi2_token chi2_seq log_ppl_diff ppl_ratio kl_entropy_ratio drift_per_1000 temperature_fit "
    "surprise_mean surprise_error surprise_excess nonfinite_tokens missing_mu_tokens left_out_share copied_share "
    "zero_tokens above_zero_tokens "
    "copied_rows_share base_pi base_mu exchanged_share is_ratio_mean_error kl_k3_error logit_error scale_slope "
    "scale_share shift_left logprob_pi logprob_mu logprob_mu_rms far_above_share far_below_share "
    "far_responses_share far_squares_share error_before_far",
    "sync": "probe_k3 probe_logit_error probe_k3_canary_ratio engine_unchanged weights_unchanged weights_other "
    "weights_compared draw_surprise_mean draw_surprise_error",
    "update": "policy_shift_k3 policy_shift_farthest",
    "policy": "entropy",
    "reward": "mean mean_pi solved_share solved_share_pi "
    "mean_error largest typical whole_range std nonfinite late unrepeated mispaired mispaired_error "
    "flat_groups_share",
    "response": "length_mean length_max return_nats repeats returned_after steps_not_new truncated_share unended_share",
    "correction": "excluded_share clipped_share rejected_share ess",
    "optim": "loss clipped_share grad_norm nonfinite_gradients loss_scale overflow overflows_in_a_row learning_rate",
    "time": "sync_seconds probe_seconds digest_seconds sample_seconds reward_seconds score_seconds learn_seconds "
    "measure_seconds step_seconds tokens_per_second sampled_tokens_per_second scored_tokens_per_second "
    "learned_tokens_per_second",
}
_OF_A_CRITIC: Final = {
    "critic": "value_loss value_mean explained_variance grad_norm loss_scale overflow overflows_in_a_row learning_rate"
}


def recorded_metrics(*, has_critic: bool) -> frozenset[str]:
    """Whole names, `room/name`, of every metric that a step's guards are given."""
    rooms = _NAMES | _OF_A_CRITIC if has_critic else _NAMES
    return frozenset(f"{room}/{name}" for room, names in rooms.items() for name in names.split())


_ASKING: Final = Asking("--task", "--num-problems", default_made=DEFAULT_NUM_PROBLEMS, default_held=None)


@dataclass(frozen=True)
class TrainingPreparation:
    """A training run ready to start."""

    settings: TrainSettings
    manifest: TrainingManifest
    folder: Path
    tokenizer: "PreTrainedTokenizerBase"
    problems: list[EncodedPrompt]
    reward: Reward
    guards: tuple[GuardSettings, ...]

    @property
    def longest_sequence(self) -> int:
        """Longest prompt, a full response, and the position that a replay adds, within the model's context."""
        longest = max(len(problem.token_ids) for problem in self.problems)
        num_tokens = longest + self.settings.rollout.max_new_tokens + 1
        context = self.manifest.model.context_length
        return num_tokens if context is None else min(num_tokens, context)


def prepare_training(
    settings: TrainSettings, guards: tuple[GuardSettings, ...] | None = None, asking: Asking = _ASKING
) -> TrainingPreparation:
    """Resolve and check everything that can be checked without a model in memory.

    `guards` are those of a run that goes on; unset, those that the settings name. `asking` is for problems.

    Raises:
        UsageError: the checkpoint, task, reward, objective, guards or engine arguments cannot be used.
    """
    from mismatch_probe.training_path.fit import require_fit

    settings = with_typed_engines(settings)
    if settings.engine.adapter is not None:
        raise UsageError(
            "train sends the engine whole weights, to which engine.adapter would be added again; leave it unset "
            "(policy.lora trains an adapter)"
        )
    objective = build_objective(settings.objective.name, settings.objective.overrides)
    require_group(objective.advantage, settings.rollout.samples)
    if guards is None:
        guards = DEFAULT_GUARDS if settings.guards is None else load_guards(settings.guards)
    written_guards = [guard.model_dump(mode="json") for guard in guards]
    metric_names = recorded_metrics(has_critic=objective.critic is not None)
    GuardBook(guards).check_metrics(metric_names, of_canary(dict.fromkeys(metric_names, 0.0)))
    _refuse_empty_raises(settings, guards)
    folder = resolve_model(settings.model)
    config = checkpoint.read_config(folder)
    identity = checkpoint.identity_of(settings.model.path, folder)
    require_fit(folder, trust_remote_code=settings.model.trust_remote_code)
    tokenizer = load_tokenizer(str(folder), trust_remote_code=settings.model.trust_remote_code)
    prompts = load_prompts(
        PromptSettings(source=settings.task.source, num_prompts=settings.task.num_problems), settings.seed, asking
    )
    task = settings.task.model_copy(update={"num_problems": len(prompts)})
    settings = settings.model_copy(update={"task": task})
    reward = load_reward(settings.task.reward, prompts)
    problems = encode_prompts(
        prompts, tokenizer, settings.task.chat_template, checkpoint.vocab_size(config), identity.context_length
    )
    check_lengths(problems, settings.rollout.max_new_tokens, identity.context_length)
    _check_server(settings, problems)
    manifest = TrainingManifest(
        **environment.manifest_head(),
        settings=settings,
        model=identity,
        content_keys={
            "settings": content_key(settings.model_dump(mode="json", exclude=free_to_change(settings))),
            "model": identity.fingerprint,
            "problems": content_key([[problem.prompt_id, problem.token_ids, problem.answer] for problem in problems]),
            "guards": content_key(written_guards),
        },
        guards=written_guards,
        versions=environment.versions(),
        hardware=environment.hardware(),
        git=environment.git_state(),
    )
    return TrainingPreparation(settings, manifest, folder, tokenizer, problems, reward, guards)


def with_typed_engines(settings: TrainSettings) -> TrainSettings:
    """The settings as a run records them."""
    return settings.model_copy(
        update={
            "engine": with_typed_arguments(settings.engine, settings.engine.name),
            "infer": tuple(with_typed_arguments(side, settings.sampler.name) for side in settings.infer),
        }
    )


def _check_server(settings: TrainSettings, problems: Sequence[EncodedPrompt]) -> None:
    if settings.server is not None:
        sampling = SamplingSettings(temperature=settings.rollout.temperature)
        check_engine(settings.infer_dtype, sampling, settings.sampler)
        longest = max(problems, key=lambda problem: len(problem.token_ids))
        check_room(settings.sampler, longest.label, len(longest.token_ids))


def _refuse_empty_raises(settings: TrainSettings, guards: tuple[GuardSettings, ...]) -> None:
    """
    Raises:
        UsageError: a guard would raise the precision of a side that is in FP32 already.
    """
    for action in GuardBook(guards).declared_actions:
        if action.kind is ActionKind.RAISE_PRECISION and getattr(settings, f"{action.side}_dtype") == Dtype.FP32:
            raise UsageError(
                f"a guard asks for {action}, and --{action.side}-dtype is fp32 already; give that guard another action"
            )
        if action.kind is ActionKind.RAISE_PRECISION and action.side == "infer" and settings.server is not None:
            raise UsageError(
                f"a guard asks for {action}, and a server computes in the dtype that it was started with; give that "
                "guard another action"
            )


def free_to_change(settings: TrainSettings) -> dict[str, Any]:
    """What a resumed run may have otherwise, as pydantic excludes it; guards have a key of their own, a decaying rate
    needs its steps, checks change nothing that is learnt, and a server that is sent the weights may have been started
    elsewhere.
    """
    free = {"report_to": True, "guards": True, "checks": True, "infer": {"__all__": {"url": True, "args": True}}}
    return free | {"steps": True} if settings.optimizer.schedule == "constant" else free


def default_training_path(command: str = "train") -> Path:
    return Path("runs") / f"{command}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
