"""What people call a metric of a training step in a sentence."""

from typing import Final

from mismatch_probe.stats.catalogue import metric_words as words_of_comparison

_WORDS: Final = {
    "correction/clipped_share": "the share that the correction bounds",
    "correction/rejected_share": "the share that the correction rejects",
    "mismatch/copied_share": "the share of log-probs that one side copied from the other",
    "mismatch/is_ratio_mean": "the mean importance weight of tokens",
    "mismatch/prob_diff_max": "the largest pi - mu",
    "mismatch/prob_diff_min": "the smallest pi - mu",
    "mismatch/surprise_mean": "the mean of log pi plus entropy",
    "mismatch/temperature_fit": "the fitted temperature of pi over that of mu",
    "mismatch/copied_rows_share": "the share of responses whose sides are copies",
    "optim/grad_norm": "the gradient norm",
    "optim/learning_rate": "the learning rate",
    "optim/loss": "the loss",
    "optim/nonfinite_gradients": "the number of gradients that are not finite",
    "optim/overflows_in_a_row": "the number of overflows in a row",
    "policy/entropy": "the entropy of the policy",
    "response/length_mean": "the mean length of responses",
    "response/repeats": "the number of steps before with the same responses",
    "response/returned_after": "the number of steps since the same responses came last",
    "response/steps_not_new": "the number of steps in a row without a new batch",
    "response/truncated_share": "the share of responses that were cut",
    "response/unended_share": "the share of responses without an end token",
    "reward/flat_groups_share": "the share of prompts whose responses earned the same",
    "reward/largest": "the largest reward",
    "reward/mean": "the mean reward",
    "reward/mispaired": "the number of mispaired rewards",
    "reward/nonfinite": "the number of rewards that are not finite",
    "reward/typical": "the usual reward",
    "reward/unrepeated": "the number of rewards that were not repeated",
    "reward/whole_range": "the range of rewards of whole responses",
    "sync/engine_unchanged": "the number of engines that a sync left unchanged",
    "sync/probe_k3": "KL (k3) on the probe",
    "sync/probe_logit_error": "the error of a logit on the probe",
    "sync/weights_other": "the number of weights that are not those sent",
    "sync/weights_unchanged": "the number of weights that a sync left unchanged",
    "time/reward_seconds": "the seconds that rewards took",
    "update/policy_shift_farthest": "what the farthest tenth of the tokens makes of the policy's shift",
    "update/policy_shift_k3": "KL (k3) between the policy before and after the update",
}
_OF_COMPARISON: Final = "mismatch/"


def metric_words(name: str) -> str:
    """`the loss` for `optim/loss`; a metric that is somebody's own, or has no words here, by its name."""
    if name in _WORDS:
        return _WORDS[name]
    short = name.removeprefix(_OF_COMPARISON)
    words = words_of_comparison(short) if short != name else name
    return name if words == short.replace("_", " ") else words
