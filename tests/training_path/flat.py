import numpy as np

from mismatch_probe.records.sequences import ScoredSequence


def flat(scores: list[ScoredSequence]) -> np.ndarray:
    """The log-probs of all sequences, end to end."""
    return np.concatenate([sequence.logprobs for sequence in scores])


def mean_error(scores: list[ScoredSequence], reference: list[ScoredSequence]) -> float:
    return float(np.abs(flat(scores) - flat(reference)).mean())
