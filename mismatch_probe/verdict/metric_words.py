"""What people call a metric in a sentence."""

from typing import Final

_WORDS: Final = {
    "abs_logprob_diff": "mean |d|",
    "abs_logprob_diff_max": "the largest |d|",
    "abs_logprob_diff_seq": "mean |d| of responses",
    "bitwise_equal": "the share of equal log-probs",
    "chi2_seq": "chi-squared of responses",
    "chi2_token": "chi-squared of tokens",
    "differs": "the share of tokens that differ",
    "ess_seq": "ESS of responses",
    "ess_token": "ESS of tokens",
    "is_ratio_mean_seq": "the mean importance weight of responses",
    "is_ratio_mean_token": "the mean importance weight of tokens",
    "kl_entropy_ratio": "KL over entropy",
    "kl_k1": "KL (k1)",
    "kl_k1_seq": "KL (k1) of responses",
    "kl_k2": "KL (k2)",
    "kl_k2_seq": "KL (k2) of responses",
    "kl_k3": "KL (k3)",
    "kl_k3_seq": "KL (k3) of responses",
    "log_ppl_diff": "the difference of log-perplexities",
    "logprob_diff_rms": "rms d",
    "ppl_ratio": "the ratio of perplexities",
    "prob_abs_diff": "mean |pi - mu|",
    "prob_abs_diff_max": "the largest |pi - mu|",
    "prob_abs_diff_std": "the standard deviation of |pi - mu|",
    "prob_diff_extremes_max": "the largest pi - mu",
    "prob_diff_extremes_min": "the smallest pi - mu",
    "prob_pearson": "the correlation of the two probabilities",
    "token_mult_prob_error": "the mean probability factor",
    "token_mult_prob_error_max": "the largest probability factor",
    "top1_flip": "the share of top tokens that differ",
}
_QUANTILE: Final = "abs_logprob_diff_p"
_BAND: Final = "outside_band_"


def metric_words(name: str) -> str:
    """`KL (k3)` for `kl_k3`; a name that this version does not know, without its underscores."""
    if name.startswith(_QUANTILE):
        return f"p{name.removeprefix(_QUANTILE).replace('_', '.')} of |d|"
    if name.startswith(_BAND):
        low, _, high = name.removeprefix(_BAND).partition("_")
        return f"the share of tokens outside [{low}, {high}]"
    return _WORDS.get(name, name.replace("_", " "))
