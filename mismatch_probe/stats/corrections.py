"""The correction rules in use, and a simulator of what each leaves of a sample and how that changes with length.

Each rule is named for what it does: it truncates a weight, masks (weighs and rejects), or only rejects.

Sources: token and sequence truncation and masking, geometric rejection, k3 and veto from verl's rollout correction (its
C is 2, TRL's and arXiv 2510.26788's 3); IcePop from ring-1T (0.5 to 5); the probability mask of DPPO from arXiv
2602.04879; off-policy sequence masking from DeepSeek-V3.2 (threshold of slime). The last two depend on the advantage's
sign: each is simulated as if every advantage had the sign on which it acts.

The columns of a decision are: units, kept units, clipped units, applied weight minus 1 of the kept units, its square,
applied minus true weight (a rejected unit's applied weight is 0), and the absolute value of that.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from mismatch_probe.stats.bins import PositionGrid, log_ends
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio, squared_variation
from mismatch_probe.stats.metrics import clip_log_ratios, k3_terms, weight_excess
from mismatch_probe.stats.results import LEVEL, CorrectionAtLength, CorrectionResult, Unit
from mismatch_probe.stats.sequences import Floats, Mask, TokenPair

CAPS = (2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class TokenEvidence:
    """The values that a rule on tokens reads [n]: d, and the probability under pi minus that under mu."""

    log_ratio: Floats
    prob_diff: Floats


@dataclass(frozen=True)
class SequenceEvidence:
    """The values that a rule on sequences reads [N]: S, S / T, the mean k3 term of its tokens, its smallest d."""

    log_ratio: Floats
    mean_log_ratio: Floats
    mean_k3: Floats
    least_log_ratio: Floats


@dataclass(frozen=True)
class AppliedWeights:
    """A rule's decision on each unit."""

    excess: Floats
    """The applied weight minus 1 of the units that are kept."""
    kept: Mask
    clipped: Mask
    """The units that are kept with a smaller weight than their own."""


Evidence = TypeVar("Evidence", TokenEvidence, SequenceEvidence)


@dataclass(frozen=True)
class Rule(Generic[Evidence]):
    name: str
    also_known_as: str
    decide: Callable[[Evidence], AppliedWeights]


def _weigh(evidence: TokenEvidence | SequenceEvidence) -> AppliedWeights:
    return _mask(evidence, 0.0, math.inf)


def _truncate(evidence: TokenEvidence | SequenceEvidence, cap: float) -> AppliedWeights:
    is_clipped = evidence.log_ratio > math.log(cap)
    excess = np.where(is_clipped, cap - 1, weight_excess(evidence.log_ratio))
    return AppliedWeights(excess, np.ones_like(is_clipped), is_clipped)


def _mask(evidence: TokenEvidence | SequenceEvidence, low: float, high: float) -> AppliedWeights:
    weight = np.exp(clip_log_ratios(evidence.log_ratio))
    return _with_own_weight(evidence, (weight >= low) & (weight <= high))


def _drop_raised(evidence: TokenEvidence, most: float) -> AppliedWeights:
    return _with_own_weight(evidence, evidence.prob_diff <= most)


def _drop_lowered(evidence: TokenEvidence, most: float) -> AppliedWeights:
    return _with_own_weight(evidence, evidence.prob_diff >= -most)


def _reject_geometric(evidence: SequenceEvidence, low: float, high: float) -> AppliedWeights:
    mean = np.exp(clip_log_ratios(evidence.mean_log_ratio))
    return _with_weight_one((mean >= low) & (mean <= high))


def _reject_k3(evidence: SequenceEvidence, most: float) -> AppliedWeights:
    return _with_weight_one(evidence.mean_k3 <= most)


def _reject_veto(evidence: SequenceEvidence, least: float) -> AppliedWeights:
    return _with_weight_one(evidence.least_log_ratio >= math.log(least))


def _reject_k1(evidence: SequenceEvidence, most: float) -> AppliedWeights:
    return _with_weight_one(-evidence.mean_log_ratio <= most)


def _with_own_weight(evidence: TokenEvidence | SequenceEvidence, is_kept: Mask) -> AppliedWeights:
    return AppliedWeights(weight_excess(evidence.log_ratio), is_kept, np.zeros_like(is_kept))


def _with_weight_one(is_kept: Mask) -> AppliedWeights:
    return AppliedWeights(np.zeros(is_kept.shape), is_kept, np.zeros_like(is_kept))


TOKEN_RULES: tuple[Rule[TokenEvidence], ...] = (
    Rule("token_weight", "token-level importance sampling", _weigh),
    *(Rule(f"token_truncate_{cap:g}", "Token-TIS", partial(_truncate, cap=cap)) for cap in CAPS),
    Rule("token_mask_0.5_5", "IcePop", partial(_mask, low=0.5, high=5.0)),
    Rule("token_drop_raised_0.2", "DPPO's mask where the advantage is positive", partial(_drop_raised, most=0.2)),
    Rule("token_drop_lowered_0.2", "DPPO's mask where the advantage is negative", partial(_drop_lowered, most=0.2)),
)

SEQUENCE_RULES: tuple[Rule[SequenceEvidence], ...] = (
    Rule("sequence_weight", "PG-Seq-IS", _weigh),
    *(Rule(f"sequence_truncate_{cap:g}", "Seq-TIS", partial(_truncate, cap=cap)) for cap in CAPS),
    *(Rule(f"sequence_mask_{cap:g}", "Seq-MIS", partial(_mask, low=0.0, high=cap)) for cap in CAPS),
    Rule("sequence_reject_geometric_0.999_1.001", "Geo-RS", partial(_reject_geometric, low=0.999, high=1.001)),
    Rule("sequence_reject_k3_0.01", "K3-RS", partial(_reject_k3, most=0.01)),
    Rule("sequence_reject_veto_0.0001", "token veto", partial(_reject_veto, least=1e-4)),
    Rule("sequence_reject_k1_0.0001", "DeepSeek-V3.2's mask, advantage negative", partial(_reject_k1, most=1e-4)),
)

SMALLEST_CAP = math.log(2.0)
SMALLEST_PROB_DIFF = 0.2
"""No rule on tokens changes a weight where abs(d) is at most the former and abs(pi - mu) at most the latter."""


SHORTEST_PREFIX = 16
FEWEST_SEQUENCES = 16
NUM_COLUMNS = 7


def simulate_corrections(pair: TokenPair, level: float = LEVEL) -> list[CorrectionResult]:
    """Every rule on the same rollouts: effective sample, shares, mean weight, bias.

    The effective sample size and the mean weight are of the kept units alone. Weights are computed in log space with a
    bound of 20. Effective sample size: Kish 1965, Survey Sampling, section 11.7; truncation against
    bias: Ionides 2008, J. Computational and Graphical Statistics 17:295.
    """
    estimator = Estimator(pair.sequences, level)
    grid = PositionGrid(pair.sequences, np.array(_prefix_lengths(pair)))
    return _results_of_token_rules(pair, estimator, grid) + _results_of_sequence_rules(pair, estimator, grid)


def _prefix_lengths(pair: TokenPair) -> list[int]:
    """Lengths that double; the last is the longest response."""
    longest = int(pair.sequences.lengths.max())
    return sorted({end for end in log_ends(longest, per_octave=1) if end >= SHORTEST_PREFIX} | {longest})


def _reached_by_enough(grid: PositionGrid) -> Iterator[tuple[int, Mask]]:
    """The number of each end that enough responses reach, and the mask of these responses [N]."""
    for number, rows in enumerate(grid.reached.T):
        if rows.sum() >= FEWEST_SEQUENCES:
            yield number, rows


def _decision_columns(decision: AppliedWeights, true_excess: Floats) -> Floats:
    """The columns of a decision on n units [7, n]."""
    is_kept = decision.kept.astype(np.float64)
    excess = np.where(decision.kept, decision.excess, 0.0)
    error = np.where(decision.kept, decision.excess - true_excess, -1 - true_excess)
    return np.stack([np.ones_like(is_kept), is_kept, decision.clipped, excess, excess**2, error, np.abs(error)])


def _results_of_token_rules(pair: TokenPair, estimator: Estimator, grid: PositionGrid) -> list[CorrectionResult]:
    """Tokens near weight 1 are equal under every rule and summed once; each rule decides on the others alone."""
    excess = weight_excess(pair.diff)
    is_outer = (pair.abs_diff > SMALLEST_CAP) | (np.abs(pair.prob_diff) > SMALLEST_PROB_DIFF)
    outer = np.flatnonzero(is_outer)
    sequence = np.searchsorted(pair.sequences.offsets, outer, side="right") - 1
    part = np.searchsorted(grid.ends, outer - pair.sequences.offsets[sequence], side="right")
    cell = sequence * grid.ends.size + part

    def by_cell(values: Floats) -> Floats:
        sums = np.bincount(cell, weights=values, minlength=grid.counts.size)
        return sums.reshape(grid.counts.shape).astype(np.float64, copy=False)

    near_columns = np.zeros((NUM_COLUMNS, *grid.counts.shape))
    near_columns[0] = near_columns[1] = grid.counts - by_cell(np.ones(outer.size))
    near_excess = np.where(is_outer, 0.0, excess)
    near_columns[3], near_columns[4] = grid.sums(near_excess), grid.sums(near_excess**2)
    evidence = TokenEvidence(pair.diff[outer], pair.prob_diff[outer])
    results = []
    for rule in TOKEN_RULES:
        decision_columns = _decision_columns(rule.decide(evidence), excess[outer])
        columns = near_columns + np.stack([by_cell(values) for values in decision_columns])
        prefixes = np.cumsum(columns, axis=2)
        by_length = [
            _correction_at_length(int(grid.ends[number]), prefixes[:, rows, number], int(rows.sum()))
            for number, rows in _reached_by_enough(grid)
        ]
        sums = columns.sum(axis=2)
        results.append(_correction_result(rule.name, rule.also_known_as, "token", estimator, sums, sums, by_length))
    return results


def _results_of_sequence_rules(pair: TokenPair, estimator: Estimator, grid: PositionGrid) -> list[CorrectionResult]:
    """The first rule leaves every weight as it is, so its `ess_seq` is the metric of that name."""
    lengths = pair.sequences.lengths
    log_ratio = np.cumsum(grid.sums(pair.diff), axis=1)
    k3 = np.cumsum(grid.sums(k3_terms(pair.diff)), axis=1)
    least = np.minimum.accumulate(grid.reduce(np.minimum, pair.diff, empty=np.inf), axis=1)

    def evidence_at(number: int) -> SequenceEvidence:
        """The evidence of the responses that reach an end, cut there; of all complete responses where it is -1."""
        rows = np.ones(lengths.size, dtype=bool) if number == -1 else grid.reached[:, number]
        num_tokens = lengths if number == -1 else grid.ends[number]
        sums, terms = log_ratio[rows, number], k3[rows, number]
        return SequenceEvidence(sums, sums / num_tokens, terms / num_tokens, least[rows, number])

    evidence_of_all = evidence_at(-1)
    prefixes = [(int(grid.ends[number]), evidence_at(number)) for number, _ in _reached_by_enough(grid)]
    results = []
    for rule in SEQUENCE_RULES:
        columns = _decision_columns(rule.decide(evidence_of_all), weight_excess(evidence_of_all.log_ratio))
        by_length = []
        for end, evidence in prefixes:
            decision_columns = _decision_columns(rule.decide(evidence), weight_excess(evidence.log_ratio))
            by_length.append(_correction_at_length(end, decision_columns, decision_columns.shape[1]))
        results.append(
            _correction_result(
                rule.name, rule.also_known_as, "sequence", estimator, columns, columns * lengths, by_length
            )
        )
    first_result, *others = results
    return [replace(first_result, ess_seq=estimator.effective_share(evidence_of_all.log_ratio, "sequence")), *others]


def _correction_at_length(num_tokens: int, columns: Floats, num_sequences: int) -> CorrectionAtLength:
    units, num_kept, num_clipped, excess, squares, _, _ = columns.sum(axis=1)
    ess = None if num_kept == 0 else float(1 / (1 + squared_variation(num_kept, excess, squares)))
    return CorrectionAtLength(num_tokens, num_sequences, ess, float(num_clipped / units), float(1 - num_kept / units))


def _correction_result(
    name: str,
    also_known_as: str,
    level: Unit,
    estimator: Estimator,
    columns: Floats,
    token_columns: Floats,
    by_length: list[CorrectionAtLength],
) -> CorrectionResult:
    """The result from the columns of each sequence [7, N], in the rule's own units and in tokens."""
    sequences = estimator.sequences
    units, num_kept, num_clipped, excess, squares, error, abs_error = (
        sequences.sum_by_cluster(column) for column in columns
    )
    token_units, token_kept, _, token_excess, token_squares, *_ = map(sequences.sum_by_cluster, token_columns)
    bias = estimator.smooth(ratio, [error, units], level)
    abs_weight_error = estimator.smooth(ratio, [abs_error, units], level, Scale.POSITIVE)
    assert bias is not None, "weights are bounded"
    assert abs_weight_error is not None, "weights are bounded"
    return CorrectionResult(
        name=name,
        level=level,
        also_known_as=also_known_as,
        ess_token=estimator.effective_share_of_totals([token_kept, token_excess, token_squares], "token"),
        ess_seq=estimator.effective_share_of_totals([num_kept, excess, squares], "sequence")
        if level == "sequence"
        else None,
        share_clipped=estimator.share_of_totals(num_clipped, units, level),
        share_rejected_token=estimator.share_of_totals(token_units - token_kept, token_units, "token"),
        share_rejected_seq=estimator.share_of_totals(units - num_kept, units, level) if level == "sequence" else None,
        mean_weight=estimator.smooth(lambda n, u: (n + u) / n, [num_kept, excess], level, Scale.POSITIVE),
        bias=bias,
        abs_weight_error=abs_weight_error,
        by_length=by_length,
    )
