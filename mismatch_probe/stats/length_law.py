"""The results of the statistics on length: records for JSON, as those of `stats.results`."""

from dataclasses import dataclass, field
from typing import Literal

from mismatch_probe.stats.results import CurveBin, Estimate


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
