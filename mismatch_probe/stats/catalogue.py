"""The catalogue of metrics: one entry each, with its words, its meaning, its better direction and its limits.

The value of a metric is computed in `stats.metrics`; everything else that any part of the tool knows of it is in its
entry. `docs/metrics.md` has the formulas, and a test holds both to the metrics that are computed.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_HEAVY_WEIGHTS: Final = (
    "squared weights hang on the few largest, which a sample may lack; use kl_k3 with clip = 5, or kl_k2"
)
_HEAVY_RESPONSES: Final = "the exponential of a whole response's log-ratio hangs on single responses; use kl_k2_seq"


@dataclass(frozen=True)
class MetricFacts:
    """The facts of a metric besides its formula."""

    words: str
    """The metric in a sentence: `KL (k3)`."""
    meaning: str
    """What it measures, in one line, with its unit."""
    higher_is_better: bool = False
    least: float = -math.inf
    most: float = math.inf
    can_regress: bool = False
    """It is positive by nature and best at an end of its range, so that it can be 10 % worse."""
    under_clip: Callable[[float], float] | None = None
    """Its largest value where the log-ratio of every token lies within a clip, in nats."""
    never_blocks: str = ""
    """Why no gate may fail by it, and what to use instead."""
    needs_clip: bool = False
    """Without a clip of the log-ratio its tail hangs on single tokens, and no gate may fail by it."""
    short: str = ""
    """Shorter words for narrow columns."""


_DEVIATION: Final = "distance of the two log-probabilities of a sampled token, in nats"
_K1: Final = "KL from mu to pi by the plain estimator, mean of -d; unbiased, may be negative"
_K2: Final = "KL from mu to pi by half the mean square of d; never negative"
_K3: Final = "KL from mu to pi by mean of e^d - d - 1; unbiased and never negative"
_FACTOR: Final = "factor by which a token's probability differs, mean of e^|d|; 1 is agreement"
_PROBABILITY: Final = "distance of the two probabilities of a sampled token"
_EXTREMES: Final = "pi - mu; values near +1 and -1 precede collapse"
_CHI2: Final = "chi-squared divergence; heavy-tailed, shown and never blocking"
_WEIGHT: Final = "mean importance weight; 1 when both policies normalise over the same tokens"
_ESS: Final = "effective sample size as a share of the samples; 1 is no loss"
_K_HAT: Final = "shape of the weights' tail; above 0.7, or less for few weights, mean and ESS cannot be believed"
_NO_INTERVAL: Final = "it says how far ess_token and ess_seq can be believed, and has no interval; use kl_k2_seq"
_EXTREME: Final = "an extreme has no interval and grows with the size of the sample; use {}"


def _of_difference(clip: float) -> float:
    return clip


METRICS: Final[dict[str, MetricFacts]] = {
    "abs_logprob_diff": MetricFacts("mean |d|", _DEVIATION, least=0, can_regress=True, under_clip=_of_difference),
    "abs_logprob_diff_p": MetricFacts("p{} of |d|", _DEVIATION, least=0, can_regress=True),
    "abs_logprob_diff_max": MetricFacts(
        "the largest |d|",
        _DEVIATION,
        never_blocks=_EXTREME.format("abs_logprob_diff or abs_logprob_diff_p99"),
        short="largest |d|",
    ),
    "abs_logprob_diff_seq": MetricFacts("mean |d| of responses", _DEVIATION, least=0, can_regress=True),
    "logprob_diff_rms": MetricFacts(
        "rms d",
        "root of the mean squared difference of log-probabilities, in nats",
        least=0,
        can_regress=True,
        under_clip=_of_difference,
    ),
    "token_mult_prob_error": MetricFacts(
        "the mean probability factor", _FACTOR, least=1, can_regress=True, under_clip=math.exp, needs_clip=True
    ),
    "token_mult_prob_error_max": MetricFacts(
        "the largest probability factor",
        _FACTOR,
        least=1,
        under_clip=math.exp,
        never_blocks=_EXTREME.format("token_mult_prob_error"),
    ),
    "prob_abs_diff": MetricFacts("mean |pi - mu|", _PROBABILITY, least=0, most=1, can_regress=True),
    "prob_abs_diff_std": MetricFacts(
        "the standard deviation of |pi - mu|", _PROBABILITY, least=0, most=1, can_regress=True
    ),
    "prob_abs_diff_max": MetricFacts(
        "the largest |pi - mu|", _PROBABILITY, least=0, most=1, never_blocks=_EXTREME.format("prob_abs_diff")
    ),
    "prob_diff_extremes_max": MetricFacts(
        "the largest pi - mu", _EXTREMES, never_blocks=_EXTREME.format("prob_abs_diff")
    ),
    "prob_diff_extremes_min": MetricFacts(
        "the smallest pi - mu", _EXTREMES, never_blocks=_EXTREME.format("prob_abs_diff")
    ),
    "prob_pearson": MetricFacts(
        "the correlation of the two probabilities",
        "correlation of the two probabilities; 1 is agreement",
        higher_is_better=True,
        least=-1,
        most=1,
        can_regress=True,
        short="correlation",
    ),
    "kl_k1": MetricFacts("KL (k1)", _K1, under_clip=_of_difference),
    "kl_k1_seq": MetricFacts("KL (k1) of responses", _K1),
    "kl_k2": MetricFacts("KL (k2)", _K2, least=0, can_regress=True, under_clip=lambda clip: clip**2 / 2),
    "kl_k2_seq": MetricFacts("KL (k2) of responses", _K2, least=0, can_regress=True),
    "kl_k3": MetricFacts(
        "KL (k3)", _K3, least=0, can_regress=True, under_clip=lambda clip: math.expm1(clip) - clip, needs_clip=True
    ),
    "kl_k3_seq": MetricFacts("KL (k3) of responses", _K3, least=0, can_regress=True, never_blocks=_HEAVY_RESPONSES),
    "kl_entropy_ratio": MetricFacts(
        "KL over entropy", "KL as a share of the policy's entropy", least=0, can_regress=True, needs_clip=True
    ),
    "chi2_token": MetricFacts("chi-squared of tokens", _CHI2, never_blocks=_HEAVY_WEIGHTS),
    "chi2_seq": MetricFacts("chi-squared of responses", _CHI2, never_blocks=_HEAVY_RESPONSES),
    "is_ratio_mean_token": MetricFacts("the mean importance weight of tokens", _WEIGHT),
    "is_ratio_mean_seq": MetricFacts(
        "the mean importance weight of responses", _WEIGHT, least=0, never_blocks=_HEAVY_RESPONSES
    ),
    "ess_token": MetricFacts(
        "ESS of tokens", _ESS, higher_is_better=True, least=0, most=1, can_regress=True, never_blocks=_HEAVY_WEIGHTS
    ),
    "ess_seq": MetricFacts(
        "ESS of responses",
        _ESS,
        higher_is_better=True,
        least=0,
        most=1,
        can_regress=True,
        never_blocks=_HEAVY_RESPONSES,
    ),
    "pareto_k_token": MetricFacts("Pareto k-hat of token weights", _K_HAT, never_blocks=_NO_INTERVAL),
    "pareto_k_seq": MetricFacts("Pareto k-hat of response weights", _K_HAT, never_blocks=_NO_INTERVAL),
    "log_ppl_diff": MetricFacts(
        "the difference of log-perplexities", "difference of mean log-probability per response, in nats"
    ),
    "ppl_ratio": MetricFacts("the ratio of perplexities", "ratio of perplexities per response"),
    "outside_band_": MetricFacts(
        "the share of tokens outside [{}, {}]",
        "share of importance weights outside the band",
        least=0,
        most=1,
        can_regress=True,
    ),
    "differs": MetricFacts(
        "the share of tokens that differ",
        "share of tokens that differ by more than 1e-6 nats",
        least=0,
        most=1,
        can_regress=True,
    ),
    "bitwise_equal": MetricFacts(
        "the share of equal log-probs",
        "share of tokens whose log-probabilities are exactly equal",
        higher_is_better=True,
        least=0,
        most=1,
        can_regress=True,
    ),
    "top1_flip": MetricFacts(
        "the share of top tokens that differ",
        "share of positions where the most probable token differs",
        least=0,
        most=1,
        can_regress=True,
        short="top-1 flips",
    ),
}
"""The entries by name; quantiles share the entry `abs_logprob_diff_p`, bands the entry `outside_band_`."""

ON_A_SUBSAMPLE: Final = {
    "full_kl": "exact KL over the whole vocabulary on a subsample",
    "full_tv": "exact total variation over the whole vocabulary on a subsample",
    "decoded_alike": "share of responses whose first tokens the engine samples again when they are decoded alone",
    "other_experts": "share of tokens and layers for which the two sides take other experts, on a subsample",
    "expert_weight_distance": "half the difference of the experts' weights over tokens and layers, on a subsample",
}
"""The meaning of quantities that are measured on a few responses only and are not metrics of a pair."""


def facts_of(name: str) -> MetricFacts | None:
    """The entry of a metric, quantiles and bands included; None where the name is not a metric's."""
    if re.fullmatch(r"abs_logprob_diff_p\d+(_\d+)?", name):
        return METRICS["abs_logprob_diff_p"]
    return METRICS["outside_band_"] if name.startswith("outside_band_") else METRICS.get(name)


def metric_words(name: str) -> str:
    """`KL (k3)` for `kl_k3`; another name loses its underscores."""
    facts = facts_of(name)
    if facts is None:
        return name.replace("_", " ")
    if name.startswith("outside_band_"):
        return facts.words.format(*name.removeprefix("outside_band_").split("_"))
    return facts.words.format(name.removeprefix("abs_logprob_diff_p").replace("_", "."))


def metric_meaning(name: str) -> str:
    """One line on what a metric measures; empty where the name is not a metric's."""
    facts = facts_of(name)
    return ON_A_SUBSAMPLE.get(name, "") if facts is None else facts.meaning
