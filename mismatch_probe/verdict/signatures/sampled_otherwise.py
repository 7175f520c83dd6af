"""Tokens that were not drawn from the distribution whose log-probs both sides record: another temperature, or a cut.

Over tokens drawn from pi the mean of log pi + H is 0, H being pi's entropy at each token. Where the sides agree and it
is not, the engine sampled from a distribution that neither side's log-probs are of: raw log-probs on both sides, as
vLLM gives by default. A sharper distribution (a temperature below, top-p, top-k) makes it positive, a flatter one
negative.
"""

import numpy as np

from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.bases import base_of_entropies
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square

LEAST_NATS = 0.02
"""Mean surprise below which nobody need care, and to which entropies in 16 bit are exact."""

LEAST_TOKENS = 200

FAR_OUTSIDE = 5.0
"""Standard errors by which the mean surprise must miss 0: over responses, and over tokens, which are a martingale."""

VARIANCE_OF_ENTROPY = 5.0
FEW_NATS = 200.0
"""Times the entropy, the least variance of a token's surprise where all entropies add up to so little: where hardly an
unlikely token came up it varies too little."""

BY_DEVIATION = 2.0
"""Times the most that a mu which lies d from pi can move the mean surprise, by Cauchy and Schwarz: rms(s) rms(d)."""


def sampled_otherwise(disagreement: Disagreement) -> Cause | None:
    """The cause where the tokens are more, or less, likely than pi's entropy says; None without entropy, and where that
    looks like logarithms to another base.
    """
    pair = disagreement.pair
    if pair.entropy_pi is None or pair.sequences.num_tokens < LEAST_TOKENS:
        return None
    entropy = pair.entropy_pi.astype(np.float64)
    log_pi = pair.log_pi.astype(np.float64)
    if base_of_entropies(log_pi, entropy) is not None:
        return None
    surprise = log_pi + entropy
    mean = float(surprise.mean())
    least_variance = VARIANCE_OF_ENTROPY * float(entropy.mean()) if entropy.sum() < FEW_NATS else 0.0
    over_tokens = np.sqrt(max(float(np.mean(surprise**2)), least_variance) / surprise.size)
    of_responses = pair.sequences.sum_by_sequence(surprise - mean)
    over_responses = np.sqrt(np.sum(of_responses**2)) / surprise.size
    least = max(
        LEAST_NATS,
        FAR_OUTSIDE * over_tokens,
        FAR_OUTSIDE * over_responses,
        BY_DEVIATION * root_mean_square(surprise) * disagreement.rms,
    )
    if abs(mean) < least:
        return None
    flatter = mean < 0
    return Cause(
        code=Code.TEMPERATURE,
        sentence="The engine does not sample from the distribution whose log-probs both sides give, but from a "
        f"{'flatter' if flatter else 'sharper'} one.",
        evidence=[
            f"the tokens are {write_number(abs(mean))} nats {'less' if flatter else 'more'} likely than the training "
            f"path's entropy of {write_number(float(entropy.mean()))} nats says, where tokens drawn from it are within "
            f"{write_number(float(least))}",
            "so sampling had a temperature "
            + ("above that of the log-probs" if flatter else "below that of the log-probs, top-p, top-k or min-p"),
        ],
        advice=[
            "Take processed log-probs from the engine (vLLM: logprobs_mode=processed_logprobs) and divide the training "
            "path's logits by the sampling temperature; or see that the entropy is that of the training path's "
            "distribution, in nats."
        ],
    )
