"""Whether a fault that was missed could be seen: what it does to the log without rounding, held against rounding.

Two laws. With the log-probs of both accounts known exactly and rounding as measured, the most powerful test tells them
apart by D = sqrt(sum((moved / floor)^2)) standard errors; `explain` asks for LEAST_SCORES, so that clean logs are not
accused. And a side is known to disagree with itself by tokens that occur again after the same context alone: of k
degrees of freedom, whose log-probs spread by s floors, it is seen where chi2_k s^2 exceeds what rounding reaches.
"""

from dataclasses import replace

import numpy as np
from scipy import special

from benchmarks.log_faults.bench import Bench, Columns, logged
from benchmarks.log_faults.catalogue import Fault
from mismatch_probe.causes.comparison import Code
from mismatch_probe.explain.judging import Account, Judge, LoggedTokens
from mismatch_probe.explain.search import LEAST_SCORES
from mismatch_probe.explain.sentences import ROUNDING_FLOORS, WRONG_AT_MOST, repeats
from mismatch_probe.notation import write_number
from mismatch_probe.stats.rounding import Floor

EVEN_ODDS = 0.5


def limit(bench: Bench, fault: Fault) -> tuple[bool, str]:
    """Whether the fault is hidden by rounding in this log, at even odds or worse, and by what figures."""
    exact = replace(bench, is_exact=True)
    declared, rounded = (np.concatenate(column).astype(np.float64) for column in (bench.ref, bench.pi))
    everywhere = np.ones(len(declared), dtype=np.bool_)
    unit = Floor.measure(rounded - declared, declared, everywhere).at(declared)
    faulty = fault.make(exact)
    moved = (np.concatenate(faulty) - declared) / unit
    scores = float(np.sqrt(np.sum(moved**2)))
    size = f"it moves log-probs by {write_number(float(np.sqrt(np.mean(moved**2))))} times the floor rms"
    if Code.NOT_REPEATABLE not in fault.expected:
        sentence = f"{size}, on which the best test has {write_number(scores)} standard errors of {LEAST_SCORES:g}"
        return scores < LEAST_SCORES, sentence
    degrees, odds = _odds_of_repeats(bench, faulty, Account(declared, unit))
    return odds < EVEN_ODDS, f"{size}; {degrees} degrees of freedom in repeated contexts, seen with odds of {odds:.0%}"


def _odds_of_repeats(bench: Bench, faulty: Columns, account: Account) -> tuple[int, float]:
    """Of a side that spreads as the fault does, rounding added."""
    tokens = LoggedTokens.of(logged(bench.sequences, bench.mu, faulty))
    column = np.concatenate(faulty).astype(np.float64)
    judge = Judge(column, np.zeros_like(column), tokens.rows, np.ones(len(column), dtype=np.bool_))
    repeated_rows = repeats(tokens, judge, account)
    if not repeated_rows.degrees:
        return 0, 0.0
    spread = 1 + repeated_rows.residual_floors**2
    least = special.chdtri(repeated_rows.degrees, WRONG_AT_MOST) * ROUNDING_FLOORS**2 / spread
    return repeated_rows.degrees, float(special.chdtrc(repeated_rows.degrees, least))
