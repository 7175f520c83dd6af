"""What the statistics answer: plain frozen records for JSON. No arrays, no NaN: what cannot be had is absent."""

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final, Literal

LEVEL: Final = 0.95
"""Of every interval for which no other level is asked."""

Unit = Literal["token", "sequence"]


def normal_quantile(level: float) -> float:
    """Standard errors to either side that hold a normal number with this probability: 1.96 at 0.95."""
    return NormalDist().inv_cdf((1 + level) / 2)


@dataclass(frozen=True)
class Estimate:
    """A number that is never bare.

    `low` and `high` bound the `level` confidence interval, clustered by sequence (by prompt where samples share one);
    both are None where no honest interval exists (maxima). `by` says what the value averages over. `num_prompts` is how
    many clusters the interval rests on, the smaller number where two samples are set against each other; None in
    records that were made before it was counted. `tail_bound` is the bound on the side of the tail with what events too
    rare for this sample may add: at or above `high`, of an effective share at or below `low`; None where a metric has
    no such tail.
    """

    value: float
    low: float | None
    high: float | None
    level: float
    num_sequences: int
    num_tokens: int
    by: Unit
    num_prompts: int | None = None
    tail_bound: float | None = None

    @property
    def standard_error(self) -> float | None:
        """That of a normal number whose interval is as wide; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / (2 * normal_quantile(self.level))

    @property
    def tail_is_open(self) -> bool:
        """Whether rare events may add more than half of what the interval reaches."""
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
    """abs(d) by position for tokens of one confidence: `by` lies in [low, high).

    `inference_probability` (mu's) stands in where there is no reference.
    """

    by: Literal["reference_probability", "inference_probability", "entropy_nats"]
    low: float
    high: float
    abs_diff_by_position: list[CurveBin]


@dataclass(frozen=True)
class LengthLaw:
    """Deviation against length (metrics: drift, spread, length budget).

    drift_per_1000: slope of S in nats per 1,000 tokens. spread: Var(S | T) = coefficient * tau(T)**exponent, fitted
    between `fitted_from` and `fitted_up_to` tokens, where enough responses reach; tau counts the first T tokens by the
    mean square of d at their positions, over that of all tokens, and is T where every position errs alike.
    budget_tokens: T* at which sequence-level ESS falls to `budget_ess`, fitted; budget_tail_is_open: T* is known from
    above alone, since tokens too rare for the sample, or a skewness of S that it does not show, may end it sooner;
    fitted_ess: the fitted law from `fitted_from` to beyond T*; budget_closed_form: ln(1 / ESS) / (2 KL). ess_by_length:
    ESS measured on the first t tokens; ess_at_budget: the same at T* itself, where enough responses are as long.
    measured_up_to: longest response seen; a budget beyond it is an extrapolation. by_confidence separates length from
    confidence.
    """

    abs_diff_by_position: list[CurveBin]
    cumulative_diff_by_position: list[CurveBin]
    abs_diff_by_response_length: list[CurveBin]
    drift_per_1000: Estimate | None
    spread_coefficient: Estimate | None
    spread_exponent: Estimate | None
    budget_ess: float
    budget_tokens: Estimate | None
    budget_closed_form: Estimate | None
    measured_up_to: int
    median_response: float
    longest_budget_is_extrapolated: bool
    budget_tail_is_open: bool = False
    fitted_from: int | None = None
    fitted_up_to: int | None = None
    ess_at_budget: Estimate | None = None
    ess_by_length: list[AtLength] = field(default_factory=list)
    fitted_ess: list[FittedEss] = field(default_factory=list)
    by_confidence: list[ConfidenceCurve] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Blame:
    """Which side errs, against the reference: rms of e_pi and e_mu (nats), their correlation, and what makes them up.

    share_pi: rms(e_pi)^2 over the sum of both squares. Keys of `components` name a measured contrast, for instance
    `pi_weight_cast`, `pi_arithmetic`, `mu_decode_vs_prefill`; of `floors` a leg computed twice (`pi_other_batch`). Each
    value is an rms in nats per token.
    """

    rms_error_pi: Estimate | None
    rms_error_mu: Estimate | None
    error_correlation: Estimate | None
    rms_difference: Estimate
    rms_if_independent: float | None
    share_pi: Estimate | None
    components: dict[str, Estimate] = field(default_factory=dict)
    floors: dict[str, Estimate] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRouting:
    """Both sides' choice of experts in one layer, counted as the model counts its layers, from 0.

    other_experts: share of tokens for which the sides take other sets. weight_distance: half the sum over experts of
    the absolute difference of their weights, on average; 1 at most where the weights sum to 1.
    """

    layer: int
    other_experts: Estimate
    weight_distance: Estimate


@dataclass(frozen=True)
class RoutingCheck:
    """Do both sides choose the same experts and weigh them the same? Of response tokens, by prefill on both sides.

    other_experts: share of tokens and layers with other sets. in_some_layer: share of tokens with another set anywhere.
    squares_where_moved: share of the squared deviation in the tenth of tokens whose weights are furthest apart; None
    where nothing deviates.
    """

    layers: list[LayerRouting]
    other_experts: Estimate
    in_some_layer: Estimate
    weight_distance: Estimate
    squares_where_moved: Estimate | None


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
    """Few tokens that hold half of the KL (k3) or more, and the largest of them.

    of_tokens: as many as were measured. share_of_kl: of the sum of k3. zeros_pi, zeros_mu: of the few, those whose
    log-prob is exactly 0 on that side. response, position: where the largest stands; log_pi, log_mu: its log-probs.
    """

    num_tokens: int
    of_tokens: int
    share_of_kl: float
    zeros_pi: int
    zeros_mu: int
    response: str
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
    """What one correction rule leaves of the sample.

    name: what the rule does (`token_truncate_3`). level: what it weighs and rejects; a rule for tokens has no `_seq`
    figures. ess_*: Kish's effective sample size of the kept weights over the number kept, None where nothing is kept;
    for a rule on sequences `ess_token` counts each kept token with its sequence's weight. share_*: of all tokens or
    sequences. mean_weight: of what is kept. bias: mean applied weight, rejected ones as 0, minus mean true weight.
    abs_weight_error: mean absolute difference of the two; it bounds the bias of the mean of anything within +-1.
    """

    name: str
    level: Unit
    also_known_as: str
    ess_token: Estimate | None
    ess_seq: Estimate | None
    share_clipped: Estimate
    share_rejected_token: Estimate
    share_rejected_seq: Estimate | None
    mean_weight: Estimate | None
    bias: Estimate
    abs_weight_error: Estimate
    by_length: list[CorrectionAtLength]


@dataclass(frozen=True)
class SampledAgainstExact:
    """A sampled estimator and its difference from the exact value at the same positions.

    agrees: the interval of the difference holds 0.
    """

    sampled: Estimate
    difference: Estimate
    agrees: bool


@dataclass(frozen=True)
class FullVocabularyCheck:
    """Exact KL(mu || pi) and total variation over the whole vocabulary, and the sampled estimators against them.

    Keys of `estimators`: `kl_k1`, `kl_k2`, `kl_k3` against the exact KL, `tv` against the exact total variation.
    """

    full_kl: Estimate
    full_tv: Estimate
    estimators: dict[str, SampledAgainstExact]
