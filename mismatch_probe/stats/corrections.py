"""The correction simulator: what each rule would leave of these rollouts, and how that changes with length.

A rule's work is summed in columns: units decided on, kept, clipped, applied weight minus 1 of the kept and its square,
applied minus true weight (a rejected unit's applied weight is 0) and the absolute value of that.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mismatch_probe.stats.bins import PositionGrid, log_ends
from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio, squared_variation
from mismatch_probe.stats.results import CorrectionAtLength, CorrectionResult, Unit
from mismatch_probe.stats.rules import (
    SEQUENCE_RULES,
    SMALLEST_CAP,
    SMALLEST_PROB_DIFF,
    TOKEN_RULES,
    AppliedWeights,
    SequenceEvidence,
    TokenEvidence,
)
from mismatch_probe.stats.sequences import Floats, Mask, TokenPair
from mismatch_probe.stats.weights import weight_excess

SHORTEST_PREFIX = 16
FEWEST_SEQUENCES = 16
NUM_COLUMNS = 7


def simulate_corrections(pair: TokenPair, level: float = 0.95) -> list[CorrectionResult]:
    """Every rule of `rules` on the same rollouts: effective sample, shares, mean weight, bias.

    What is rejected leaves the denominator of the effective sample size and of the mean weight. Weights are computed in
    log space with a bound of 20. Effective sample size: Kish 1965, Survey Sampling, section 11.7; truncation against
    bias: Ionides 2008, J. Computational and Graphical Statistics 17:295.
    """
    estimator = Estimator(pair.sequences, level)
    grid = PositionGrid(pair.sequences, np.array(_prefix_lengths(pair)))
    return _token_results(pair, estimator, grid) + _sequence_results(pair, estimator, grid)


def _prefix_lengths(pair: TokenPair) -> list[int]:
    """Doubling lengths; the last is the longest response."""
    longest = int(pair.sequences.lengths.max())
    return sorted({end for end in log_ends(longest, per_octave=1) if end >= SHORTEST_PREFIX} | {longest})


def _reached_by_enough(grid: PositionGrid) -> Iterator[tuple[int, Mask]]:
    """Number of each end that enough responses reach, and which [N]."""
    for number, rows in enumerate(grid.reached.T):
        if rows.sum() >= FEWEST_SEQUENCES:
            yield number, rows


def _columns(decision: AppliedWeights, true_excess: Floats) -> Floats:
    """[7, n] of one decision on n units."""
    kept = decision.kept.astype(np.float64)
    excess = np.where(decision.kept, decision.excess, 0.0)
    error = np.where(decision.kept, decision.excess - true_excess, -1 - true_excess)
    return np.stack([np.ones_like(kept), kept, decision.clipped, excess, excess**2, error, np.abs(error)])


def _token_results(pair: TokenPair, estimator: Estimator, grid: PositionGrid) -> list[CorrectionResult]:
    """Tokens near weight 1 are the same under every rule and summed once; each rule decides on the others."""
    excess = weight_excess(pair.diff)
    is_outer = (pair.abs_diff > SMALLEST_CAP) | (np.abs(pair.prob_diff) > SMALLEST_PROB_DIFF)
    outer = np.flatnonzero(is_outer)
    sequence = np.searchsorted(pair.sequences.offsets, outer, side="right") - 1
    part = np.searchsorted(grid.ends, outer - pair.sequences.offsets[sequence], side="right")
    cell = sequence * grid.ends.size + part

    def by_cell(values: Floats) -> Floats:
        sums = np.bincount(cell, weights=values, minlength=grid.counts.size)
        return sums.reshape(grid.counts.shape).astype(np.float64, copy=False)

    near = np.zeros((NUM_COLUMNS, *grid.counts.shape))
    near[0] = near[1] = grid.counts - by_cell(np.ones(outer.size))
    near_excess = np.where(is_outer, 0.0, excess)
    near[3], near[4] = grid.sums(near_excess), grid.sums(near_excess**2)
    evidence = TokenEvidence(pair.diff[outer], pair.prob_diff[outer])
    results = []
    for rule in TOKEN_RULES:
        decided = _columns(rule.decide(evidence), excess[outer])
        columns = near + np.stack([by_cell(values) for values in decided])
        prefixes = np.cumsum(columns, axis=2)
        by_length = [
            _at_length(int(grid.ends[number]), prefixes[:, rows, number], int(rows.sum()))
            for number, rows in _reached_by_enough(grid)
        ]
        sums = columns.sum(axis=2)
        results.append(_result(rule.name, rule.also_known_as, "token", estimator, sums, sums, by_length))
    return results


def _sequence_results(pair: TokenPair, estimator: Estimator, grid: PositionGrid) -> list[CorrectionResult]:
    """The first rule leaves every weight as it is, so its `ess_seq` is the metric of that name."""
    lengths = pair.sequences.lengths
    log_ratio = np.cumsum(grid.sums(pair.diff), axis=1)
    k3 = np.cumsum(grid.sums(k3_terms(pair.diff)), axis=1)
    least = np.minimum.accumulate(grid.reduce(np.minimum, pair.diff, empty=np.inf), axis=1)

    def evidence_at(number: int) -> SequenceEvidence:
        """Of the responses that reach an end, cut there; -1: of all, whole."""
        rows = np.ones(lengths.size, dtype=bool) if number == -1 else grid.reached[:, number]
        num_tokens = lengths if number == -1 else grid.ends[number]
        sums, terms = log_ratio[rows, number], k3[rows, number]
        return SequenceEvidence(sums, sums / num_tokens, terms / num_tokens, least[rows, number])

    whole = evidence_at(-1)
    prefixes = [(int(grid.ends[number]), evidence_at(number)) for number, _ in _reached_by_enough(grid)]
    results = []
    for rule in SEQUENCE_RULES:
        columns = _columns(rule.decide(whole), weight_excess(whole.log_ratio))
        by_length = []
        for end, evidence in prefixes:
            decided = _columns(rule.decide(evidence), weight_excess(evidence.log_ratio))
            by_length.append(_at_length(end, decided, decided.shape[1]))
        results.append(
            _result(rule.name, rule.also_known_as, "sequence", estimator, columns, columns * lengths, by_length)
        )
    unchanged, *others = results
    return [replace(unchanged, ess_seq=estimator.effective_share(whole.log_ratio, "sequence")), *others]


def _at_length(num_tokens: int, columns: Floats, num_sequences: int) -> CorrectionAtLength:
    units, kept, clipped, excess, squares, _, _ = columns.sum(axis=1)
    ess = None if kept == 0 else float(1 / (1 + squared_variation(kept, excess, squares)))
    return CorrectionAtLength(num_tokens, num_sequences, ess, float(clipped / units), float(1 - kept / units))


def _result(
    name: str,
    also_known_as: str,
    level: Unit,
    estimator: Estimator,
    columns: Floats,
    token_columns: Floats,
    by_length: list[CorrectionAtLength],
) -> CorrectionResult:
    """From the columns of each sequence [7, N], counted in the rule's own units and in tokens."""
    sequences = estimator.sequences
    units, kept, clipped, excess, squares, error, abs_error = (sequences.sum_by_cluster(column) for column in columns)
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
        ess_seq=estimator.effective_share_of_totals([kept, excess, squares], "sequence")
        if level == "sequence"
        else None,
        share_clipped=estimator.share_of_totals(clipped, units, level),
        share_rejected_token=estimator.share_of_totals(token_units - token_kept, token_units, "token"),
        share_rejected_seq=estimator.share_of_totals(units - kept, units, level) if level == "sequence" else None,
        mean_weight=estimator.smooth(lambda n, u: (n + u) / n, [kept, excess], level, Scale.POSITIVE),
        bias=bias,
        abs_weight_error=abs_weight_error,
        by_length=by_length,
    )
