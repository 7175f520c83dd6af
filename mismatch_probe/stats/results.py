"""What the statistics hand on: plain frozen records, ready for JSON. No arrays, no NaN: what cannot be had is absent."""

from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["token", "sequence"]


@dataclass(frozen=True)
class Estimate:
    """A number that is never bare.

    `low` and `high` bound the `level` confidence interval, clustered by sequence (by prompt where samples share one);
    both are None where no honest interval exists (maxima). `by` says what the value averages over.
    """

    value: float
    low: float | None
    high: float | None
    level: float
    num_sequences: int
    num_tokens: int
    by: Unit


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
class LengthLaw:
    """Deviation against length (metrics: drift, spread, length budget).

    drift_per_1000: slope of S in nats per 1,000 tokens. spread: Var(S | T) = coefficient * T**exponent.
    budget_tokens: T* at which sequence-level ESS falls to `budget_ess`, fitted; budget_closed_form: ln 2 / (2 KL).
    measured_up_to: longest response seen; a budget beyond it is an extrapolation.
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
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Blame:
    """Which side errs, against the reference: rms of e_pi and e_mu (nats), their correlation, and what makes them up.

    Keys of `components` name a measured contrast, for instance `pi_weight_cast`, `pi_arithmetic`, `mu_decode_vs_prefill`;
    each value is an rms in nats per token.
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
