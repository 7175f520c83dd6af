"""What guards may read of a step, known before there is one; docs/train-metrics.md says what each name means."""

from typing import Final

_NAMES: Final = {
    "mismatch": "kl_k1 kl_k3 abs_logprob_diff abs_logprob_diff_max abs_logprob_diff_seq logprob_diff_rms "
    "token_mult_prob_error prob_abs_diff prob_abs_diff_max prob_diff_max prob_diff_min prob_pearson is_ratio_mean "
    "ess_token ess_seq chi2_token chi2_seq log_ppl_diff ppl_ratio kl_entropy_ratio drift_per_1000 temperature_fit "
    "surprise_mean surprise_error surprise_excess nonfinite_tokens missing_mu_tokens left_out_share "
    "is_ratio_mean_error kl_k3_error logit_error scale_slope scale_share shift_left "
    "logprob_pi logprob_mu far_above_share far_below_share "
    "far_responses_share far_squares_share error_before_far",
    "sync": "probe_k3 probe_logit_error probe_k3_canary_ratio engine_unchanged weights_unchanged weights_other "
    "weights_compared",
    "update": "policy_shift_k3",
    "policy": "entropy",
    "reward": "mean mean_error largest typical whole_range std nonfinite late unrepeated mispaired mispaired_error "
    "flat_groups_share",
    "response": "length_mean length_max repeats truncated_share unended_share",
    "correction": "excluded_share clipped_share rejected_share ess",
    "optim": "loss clipped_share grad_norm nonfinite_gradients loss_scale overflow overflows_in_a_row learning_rate",
    "time": "sync_seconds probe_seconds digest_seconds sample_seconds reward_seconds score_seconds learn_seconds "
    "measure_seconds step_seconds tokens_per_second sampled_tokens_per_second scored_tokens_per_second "
    "learned_tokens_per_second",
}
_OF_A_CRITIC: Final = {
    "critic": "value_loss value_mean explained_variance grad_norm loss_scale overflow overflows_in_a_row learning_rate",
}


def recorded_metrics(*, has_critic: bool) -> frozenset[str]:
    """Whole names, `room/name`, of every metric that a step's guards are given."""
    rooms = _NAMES | _OF_A_CRITIC if has_critic else _NAMES
    return frozenset(f"{room}/{name}" for room, names in rooms.items() for name in names.split())
