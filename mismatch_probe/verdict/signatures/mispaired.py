"""Responses scored with, or joined to, another response: all or nothing per response, and an exchange restores it."""

import numpy as np

from mismatch_probe.notation import write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Floats, Ints, Reals, Sequences
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement

MOST_EXAMINED = 64
"""Responses whose partner is looked for, and the first tokens compared; enough to tell and quick for any run."""

RESTORED_FLOORS = 5.0
RESTORED_RMS = 0.2
"""Largest rms deviation from the true partner: in floors; without a reference to measure one, of what it was before."""

LEAST_RESTORED = 0.8
"""Partners that must be found, each another one, for every response that is examined."""

LEAST_OVERLAP = 8


def mispaired(disagreement: Disagreement) -> Cause | None:
    """The cause where the responses that disagree fit other responses' scores."""
    if disagreement.is_rounding:
        return None
    sequences = disagreement.pair.sequences
    own = disagreement.rms_by_sequence
    off = np.flatnonzero(own > max(10 * disagreement.floor, RESTORED_RMS * own.max()))
    if off.size < 2:
        return None
    examined = off[np.linspace(0, off.size - 1, min(off.size, MOST_EXAMINED)).astype(np.int64)]
    log_pi, log_mu = (_heads(leg, sequences) for leg in (disagreement.pair.log_pi, disagreement.pair.log_mu))
    has_floor = disagreement.pair.log_ref is not None
    most = RESTORED_FLOORS * disagreement.floor if has_floor else RESTORED_RMS * float(np.median(own[off]))
    partners = [_partner(row, off, log_pi, log_mu, most) for row in examined]
    distinct = {partner for partner in partners if partner is not None}
    if len(distinct) < LEAST_RESTORED * examined.size:
        return None
    return Code.MISPAIRED.cause(
        count=off.size,
        total=sequences.num_sequences,
        evidence=[
            f"{write_percent(len(distinct) / examined.size)} of the responses that disagree fit scores of another one",
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


def _partner(row: int, candidates: Ints, log_pi: Floats, log_mu: Floats, most: float) -> int | None:
    """The response whose log pi fits this one's log mu best, if to within `most` nats rms."""
    others = candidates[candidates != row]
    squares = (log_pi[others] - log_mu[row]) ** 2
    overlap = np.isfinite(squares).sum(axis=1)
    mean = np.where(overlap >= LEAST_OVERLAP, np.nansum(squares, axis=1) / np.maximum(overlap, 1), np.inf)
    best = int(mean.argmin())
    return int(others[best]) if mean[best] <= most**2 else None
