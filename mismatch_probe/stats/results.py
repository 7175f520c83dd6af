"""The results of the statistics: frozen records for JSON, without arrays or NaN; what cannot be computed is absent."""

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Final, Literal

LEVEL: Final = 0.95
"""The level of every interval for which a user gives no other."""

Unit = Literal["token", "sequence"]


def normal_quantile(level: float) -> float:
    """The number of standard errors to either side that contain a normal number with this probability: 1.96 at 0.95."""
    return NormalDist().inv_cdf((1 + level) / 2)


@dataclass(frozen=True)
class Estimate:
    """A number with its interval and its counts."""

    value: float
    low: float | None
    """The lower bound of the confidence interval, clustered by sequence (by prompt where samples share one).

    It is None, as `high` is, where no honest interval exists (maxima).
    """
    high: float | None
    level: float
    """The level of the interval."""
    num_sequences: int
    num_tokens: int
    by: Unit
    """The unit that the value averages over."""
    num_prompts: int | None = None
    """The number of clusters of the interval, the smaller number where two samples are compared.

    It is None in records that were made before it was counted.
    """
    tail_bound: float | None = None
    """The bound on the side of the tail, with what events too rare for this sample may add.

    It is at or above `high`, of an effective share at or below `low`; None where a metric has no such tail.
    """

    @property
    def standard_error(self) -> float | None:
        """The standard error of a normal number with an interval of this width; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / (2 * normal_quantile(self.level))

    @property
    def tail_is_open(self) -> bool:
        """Whether rare events may add more than half of the reach of the interval."""
        if self.tail_bound is None or self.low is None or self.high is None:
            return False
        is_above = self.tail_bound > self.high
        reach = self.high - self.value if is_above else self.value - self.low
        return abs(self.tail_bound - self.value) > 1.5 * reach


@dataclass(frozen=True)
class CurveBin:
    """One bin of a curve; quantiles are over tokens or sequences of the bin, `mean` has its interval."""

    low: float
    high: float
    center: float
    mean: Estimate
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Blame:
    """The errors of both sides against the reference: rms of e_pi and e_mu (nats) and their correlation."""

    rms_error_pi: Estimate | None
    rms_error_mu: Estimate | None
    error_correlation: Estimate | None
    rms_difference: Estimate
    rms_if_independent: float | None
    share_pi: Estimate | None
    """rms(e_pi)^2 over the sum of both squares."""
    components: dict[str, Estimate] = field(default_factory=dict)
    """The rms of each measured contrast, nats: `pi_weight_cast`, `pi_arithmetic`, `mu_decode_vs_prefill` and others."""
    floors: dict[str, Estimate] = field(default_factory=dict)
    """The rms between two computations of one leg, nats: `pi_other_batch` and others."""
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditioning:
    """What rounding in FP32 alone does to a checkpoint's log-probs, and how far both sides are from FP64.

    Errors are means of absolute differences from the reference in FP64, nats a token.
    """

    error_fp32: Estimate
    """The error of the reference in FP32, which is rounding: model and code are those of the reference in FP64."""
    largest_fp32: float
    """The largest of these errors of a token, nats."""
    error_pi: Estimate
    error_mu: Estimate
    times_pi: dict[str, Estimate]
    """How many times as large pi's errors are as the reference's: the mean, quantiles (p50, p90, p99), and the
    largest error of a token where neither the reference nor the other side errs much (lone)."""
    times_mu: dict[str, Estimate]
    """The same of mu's errors."""


@dataclass(frozen=True)
class LayerRouting:
    """Both sides' choice of experts in one layer."""

    layer: int
    """The number of the layer in the model, from 0."""
    other_experts: Estimate
    """The share of tokens for which the sides take different sets of experts."""
    weight_distance: Estimate
    """The mean of half the sum over experts of the absolute difference of weights; at most 1 where weights sum to 1."""


@dataclass(frozen=True)
class RoutingCheck:
    """The choice and the weights of experts on both sides, of response tokens and by prefill on both sides."""

    layers: list[LayerRouting]
    other_experts: Estimate
    """The share of tokens and layers with different sets of experts."""
    in_some_layer: Estimate
    """The share of tokens with a different set in at least one layer."""
    weight_distance: Estimate
    squares_where_moved: Estimate | None
    """The share of the squared deviation in the tenth of tokens with the largest distance of weights.

    It is None where nothing deviates.
    """


@dataclass(frozen=True)
class ConfidenceBin:
    """Deviation inside one bin of the reference probability of the sampled token."""

    low: float
    high: float
    num_tokens: int
    mean_abs_diff: Estimate
    rms_error_pi: float | None
    rms_error_mu: float | None


@dataclass(frozen=True)
class ProbabilityScatter:
    """Two-dimensional histogram of token probabilities under mu (x) and pi (y); `cells` lists [x bin, y bin, count]."""

    num_bins: int
    cells: list[tuple[int, int, int]]


@dataclass(frozen=True)
class ErrorHistogram:
    """Histogram of log10 abs(error) against the reference for one side; `zeros` counts exact agreement."""

    side: Literal["pi", "mu"]
    edges_log10: list[float]
    counts: list[int]
    zeros: int


@dataclass(frozen=True)
class WorstToken:
    """One of the largest deviations: which row, which position in the response, and the log-probs there (nats)."""

    row: int
    position: int
    log_pi: float
    log_mu: float
    log_ref: float | None


@dataclass(frozen=True)
class FewTokens:
    """A few tokens that contribute half of the KL (k3) or more, and the largest of them."""

    num_tokens: int
    of_tokens: int
    """The number of all measured tokens."""
    share_of_kl: float
    """The tokens' share of the sum of k3."""
    zeros_pi: int
    zeros_mu: int
    """How many of these tokens have a log-prob of exactly 0 on that side."""
    response: str
    """The response of the largest of them; `position` is its position there, `log_pi` and `log_mu` its log-probs."""
    position: int
    log_pi: float
    log_mu: float


@dataclass(frozen=True)
class CorrectionAtLength:
    """A correction on the first `num_tokens` tokens of every response that has as many."""

    num_tokens: int
    num_sequences: int
    ess: float | None
    share_clipped: float
    share_rejected: float


@dataclass(frozen=True)
class CorrectionResult:
    """The effect of one correction rule on the sample; shares are of all tokens or sequences."""

    name: str
    """What the rule does: `token_truncate_3`."""
    level: Unit
    """The unit that the rule weighs and rejects; a rule for tokens has no `_seq` figures."""
    also_known_as: str
    ess_token: Estimate | None
    """Kish's effective sample size of the kept weights over their number; None where nothing is kept.

    For a rule on sequences each kept token has its sequence's weight.
    """
    ess_seq: Estimate | None
    share_clipped: Estimate
    share_rejected_token: Estimate
    share_rejected_seq: Estimate | None
    mean_weight: Estimate | None
    """The mean weight of what is kept."""
    bias: Estimate
    """The mean applied weight, where a rejected one is 0, minus the mean true weight."""
    abs_weight_error: Estimate
    """The mean absolute difference of the two weights; it bounds the bias of the mean of anything within +-1."""
    by_length: list[CorrectionAtLength]


@dataclass(frozen=True)
class SampledAgainstExact:
    """A sampled estimator and its difference from the exact value at the same positions."""

    sampled: Estimate
    difference: Estimate
    agrees: bool
    """The interval of the difference contains 0."""


@dataclass(frozen=True)
class FullVocabularyCheck:
    """Exact KL(mu || pi) and total variation over the whole vocabulary, and the sampled estimators against them."""

    full_kl: Estimate
    full_tv: Estimate
    estimators: dict[str, SampledAgainstExact]
    """`kl_k1`, `kl_k2` and `kl_k3` against the exact KL, and `tv` against the exact total variation."""


@dataclass(frozen=True)
class StepGrowth:
    """A KL (k3) of a token that grows over the steps of a log, by `stats.growth`."""

    first_step: int
    first_up_to: int
    """The last of the steps that `first` is of; `first_step` where it is of one step."""
    last_from: int
    """The first of the steps that `last` is of."""
    last_step: int
    first: Estimate
    """KL (k3) of a token at the first steps, nats."""
    last: Estimate
    """The same at the last steps."""
    ratio: Estimate | None
    """Last over first; None where the first is 0."""
    steepest_step: int | None
    """The step that makes at least a third of the growth in logarithms; None where no step does."""
    step_before: int | None
    """The step before the steepest one."""
    steepest_ratio: float | None
    """KL at the steepest step over that at the step before."""
    rank_correlation: float
    """Kendall's tau-b of the step and the mean k3 of the responses."""
    p_value: float
    """The probability of such a correlation, or a larger one, where nothing grows."""
    last_abs_diff: Estimate | None = None
    """Mean abs(d) of a token at the last steps, nats; None where only the sums of a log were kept."""


@dataclass(frozen=True)
class AtLength:
    """An estimate over the first `num_tokens` tokens of every response that has as many."""

    num_tokens: int
    estimate: Estimate


@dataclass(frozen=True)
class FittedEss:
    """A point of the fitted law: the share of samples that count at a length."""

    num_tokens: float
    ess: float


@dataclass(frozen=True)
class ConfidenceCurve:
    """abs(d) by position for tokens of one confidence: `by` is in [low, high)."""

    by: Literal["reference_probability", "inference_probability", "entropy_nats"]
    """`inference_probability` (mu's) is used where there is no reference."""
    low: float
    high: float
    abs_diff_by_position: list[CurveBin]


@dataclass(frozen=True)
class LengthLaw:
    """Deviation against length: drift, spread and length budget.

    The spread is Var(S | T) = coefficient * tau(T)**exponent. tau counts the first T tokens by the mean square of d at
    their positions, over that of all tokens; it is T where every position has the same error.
    """

    abs_diff_by_position: list[CurveBin]
    cumulative_diff_by_position: list[CurveBin]
    abs_diff_by_response_length: list[CurveBin]
    drift_per_1000: Estimate | None
    """The slope of S, in nats per 1,000 tokens."""
    spread_coefficient: Estimate | None
    spread_exponent: Estimate | None
    budget_ess: float
    budget_tokens: Estimate | None
    """T*, the length at which the fitted sequence-level ESS falls to `budget_ess`."""
    budget_closed_form: Estimate | None
    """ln(1 / ESS) / (2 KL)."""
    measured_up_to: int
    """The longest response of the sample; a budget beyond it is an extrapolation."""
    median_response: float
    longest_budget_is_extrapolated: bool
    budget_tail_is_open: bool = False
    """T* is only an upper bound: rare tokens, or a skewness of S that the sample does not show, may shorten it."""
    fitted_from: int | None = None
    fitted_up_to: int | None = None
    """The spread is fitted between these lengths, which enough responses reach."""
    ess_at_budget: Estimate | None = None
    """ESS measured at T* itself, where enough responses are as long."""
    ess_by_length: list[AtLength] = field(default_factory=list)
    """ESS measured on the first t tokens."""
    fitted_ess: list[FittedEss] = field(default_factory=list)
    """The fitted law from `fitted_from` to beyond T*."""
    by_confidence: list[ConfidenceCurve] = field(default_factory=list)
    """The deviation by position for each confidence, which separates length from confidence."""
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def budget(self) -> Estimate | None:
        """T*, tokens: fitted, or by the closed form where nothing could be fitted.

        The closed form takes the errors of a response for independent: Var(S | T) = 2 KL T. Where nothing could be
        fitted, nothing shows that they are. Errors that are alike throughout a response have 2 KL T^2, which ends the
        budget at its square root; the interval begins there.
        """
        of_kl = self.budget_closed_form
        if self.budget_tokens is not None or of_kl is None or of_kl.low is None:
            return self.budget_tokens or of_kl
        return replace(of_kl, low=min(of_kl.low, math.sqrt(of_kl.low)))

    @property
    def is_extrapolated(self) -> bool:
        """Whether the budget, however it was made, lies beyond the longest response."""
        return self.budget is not None and self.budget.value > self.measured_up_to
