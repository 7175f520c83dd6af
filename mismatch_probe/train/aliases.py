"""Names that other training frameworks give to what a step measures, so that their dashboards read ours.

Only names whose definition is ours are here; each was read in the source at the commit named. Left out because the
definition differs: verl's `response_length/clip_ratio` (counts responses that end at the limit by themselves) and
`training/rollout_probs_diff_std` (divides by n - 1); TRL's `sampling/importance_sampling_ratio/*` (after truncation)
and `reward_std` (n - 1); slime's `entropy_loss` (mean of per-response means).
"""

from collections.abc import Mapping
from typing import Final

ALIASES: Final[dict[str, dict[str, str]]] = {
    "verl 1dda039b": {
        "rollout_corr/kl": "mismatch/kl_k1",
        "rollout_corr/k3_kl": "mismatch/kl_k3",
        "rollout_corr/log_ppl_diff": "mismatch/log_ppl_diff",
        "rollout_corr/ppl_ratio": "mismatch/ppl_ratio",
        "rollout_corr/chi2_token": "mismatch/chi2_token",
        "rollout_corr/chi2_seq": "mismatch/chi2_seq",
        "training/rollout_probs_diff_mean": "mismatch/prob_abs_diff",
        "training/rollout_probs_diff_max": "mismatch/prob_abs_diff_max",
        "training/rollout_actor_probs_pearson_corr": "mismatch/prob_pearson",
        "actor/entropy": "policy/entropy",
        "actor/grad_norm": "optim/grad_norm",
        "actor/lr": "optim/learning_rate",
        "critic/rewards/mean": "reward/mean",
        "response_length/mean": "response/length_mean",
        "response_length/max": "response/length_max",
        "timing_s/step": "time/step_seconds",
    },
    "TRL f2cd5771": {
        "sampling/sampling_logp_difference/mean": "mismatch/abs_logprob_diff",
        "sampling/sampling_logp_difference/max": "mismatch/abs_logprob_diff_max",
        "reward": "reward/mean",
        "frac_reward_zero_std": "reward/flat_groups_share",
        "completions/mean_length": "response/length_mean",
        "completions/max_length": "response/length_max",
        "completions/clipped_ratio": "response/truncated_share",
        "entropy": "policy/entropy",
        "grad_norm": "optim/grad_norm",
        "learning_rate": "optim/learning_rate",
    },
    "NeMo-RL 7ea279ab": {
        "train/token_mult_prob_error": "mismatch/token_mult_prob_error",
        "train/gen_kl_error": "mismatch/kl_k3",
        "train/reward": "reward/mean",
        "train/grad_norm": "optim/grad_norm",
        "train/lr": "optim/learning_rate",
    },
    "prime-rl 559b4477": {
        "mismatch_kl/all/mean": "mismatch/kl_k3",
        "kl_ent_ratio/mean": "mismatch/kl_entropy_ratio",
        "entropy/all/mean": "policy/entropy",
        "optim/lr": "optim/learning_rate",
        "time/step": "time/step_seconds",
    },
    "slime 624b824a": {
        "train/train_rollout_logprob_abs_diff": "mismatch/abs_logprob_diff_seq",
        "train/grad_norm": "optim/grad_norm",
        "train/lr-pg_0": "optim/learning_rate",
    },
}
"""Framework and commit: its name: ours. prime-rl's `optim/grad_norm` is ours as it stands."""


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics, and the same values under the names of other frameworks."""
    names = {alias: own for framework in ALIASES.values() for alias, own in framework.items()}
    return {**metrics, **{alias: metrics[own] for alias, own in names.items() if own in metrics}}
