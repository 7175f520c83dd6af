"""Responses scored with, or joined to, another response: all or nothing per response, and an exchange restores it."""

import numpy as np

from mismatch_probe.notation import write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Floats, Ints, Reals, Sequences
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

MOST_EXAMINED = 64
"""Responses whose partner is looked for, and the first tokens compared; enough to tell and quick for any run."""

RESTORED_RMS = 0.2
"""Of its own rms deviation, the most that a response may keep against its true partner."""

LEAST_RESTORED = 0.8
"""Share of the examined responses whose partner must be found."""


def mispaired(found: Disagreement) -> Cause | None:
    """The cause where the responses that disagree fit other responses' scores."""
    if found.is_rounding:
        return None
    sequences = found.pair.sequences
    own = found.rms_by_sequence
    off = np.flatnonzero(own > max(10 * found.floor, RESTORED_RMS * own.max()))
    if off.size < 2:
        return None
    examined = off[np.linspace(0, off.size - 1, min(off.size, MOST_EXAMINED)).astype(np.int64)]
    log_pi, log_mu = (_heads(leg, sequences) for leg in (found.pair.log_pi, found.pair.log_mu))
    restored = np.array([_fits_another(row, off, log_pi, log_mu) for row in examined])
    if restored.mean() < LEAST_RESTORED:
        return None
    return Code.MISPAIRED.cause(
        count=off.size,
        total=sequences.num_sequences,
        evidence=[
            f"{write_percent(float(restored.mean()))} of the responses that disagree fit another response's scores",
            f"the other {sequences.num_sequences - off.size} responses agree",
        ],
        advice=["Join both sides by a response id, not by order; look for a sort, a shuffle or a drop between them."],
    )


def _heads(leg: Reals, sequences: Sequences) -> Floats:
    """The first tokens of each response, NaN beyond its end [N, MOST_EXAMINED]."""
    heads = np.full((sequences.num_sequences, MOST_EXAMINED), np.nan)
    inside = np.flatnonzero(sequences.positions < MOST_EXAMINED)
    rows: Ints = np.repeat(np.arange(sequences.num_sequences), sequences.lengths)
    heads[rows[inside], sequences.positions[inside]] = leg[inside]
    return heads


def _fits_another(row: int, candidates: Ints, log_pi: Floats, log_mu: Floats) -> bool:
    """Whether another response's log pi fits this one's log mu far better than its own does, token for token."""
    others = candidates[candidates != row]
    squares = (log_pi[np.append(others, row)] - log_mu[row]) ** 2
    overlap = np.isfinite(squares).sum(axis=1)
    enough = overlap >= min(8, int(overlap[-1]))
    mean = np.nansum(squares, axis=1) / np.maximum(overlap, 1)
    return bool((mean[:-1][enough[:-1]] <= RESTORED_RMS**2 * mean[-1]).any())
