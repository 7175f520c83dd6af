"""A temperature applied on one side only, or a logit scale that differs, as `stats.temperature` fits it."""

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.stats.temperature import LeastSquares, temperature_columns
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.signatures.disagreement import Disagreement, root_mean_square

UNEXPLAINED_RMS = 0.35
"""Of the rms of d, the most that the fit may leave: it then explains 88 % of the variance."""

RATIOS = (0.2, 5.0)
"""Beyond these one side has lost the plot: d is then its own log-prob, whatever the cause."""

HALVES_AGREE = 0.25
"""Largest relative difference of the slopes fitted to the less and to the more uncertain half of the tokens."""

OWN_SHARE = 0.5
"""Of the variance that is left without the token's own log-prob, the least that this explains."""


LEAST_TOKENS = 32
"""A line through three numbers a token fits any few of them."""


def temperature(disagreement: Disagreement) -> Cause | None:
    """The cause where d follows the logit scale; None elsewhere, for few tokens, and without pi's entropy."""
    pair = disagreement.pair
    if pair.entropy_pi is None or disagreement.is_rounding or pair.sequences.num_tokens < LEAST_TOKENS:
        return None
    entropy = pair.entropy_pi.astype(np.float64)
    columns = temperature_columns(pair.log_pi, entropy)
    without = pair.diff - LeastSquares(columns[:, 1:], pair.diff).fitted
    fit = LeastSquares(columns, pair.diff)
    left = root_mean_square(pair.diff - fit.fitted)
    ratio = float(1 - fit.coefficients[0])
    explains = (
        left <= max(UNEXPLAINED_RMS * disagreement.rms, 2 * disagreement.floor)
        and root_mean_square(fit.fitted) > 2 * disagreement.floor
    )
    own = 1 - left**2 / root_mean_square(without) ** 2
    if not explains or own < OWN_SHARE or not RATIOS[0] < ratio < RATIOS[1] or not _halves_agree(columns, pair.diff):
        return None
    return Code.TEMPERATURE.cause(
        ratio=ratio,
        evidence=[
            f"d follows the logit scale: a temperature ratio of {ratio:.4g} explains "
            f"{write_percent(1 - left**2 / disagreement.rms**2)} of its square and leaves {write_number(left)} nats",
            _sampled_from(columns[:, 0]),
        ],
        advice=[
            "Divide the training path's logits by the sampling temperature, or take processed log-probs from the "
            "engine (vLLM: logprobs_mode=processed_logprobs)."
        ],
    )


def _halves_agree(columns: Floats, values: Floats) -> bool:
    """Whether certain and uncertain contexts tell the same slope, as one temperature makes them."""
    uncertain = columns[:, 1] > np.median(columns[:, 1])
    low, high = (LeastSquares(columns[half], values[half]).coefficients[0] for half in (~uncertain, uncertain))
    return bool(abs(low - high) <= HALVES_AGREE * max(abs(low), abs(high)))


def _sampled_from(surprise: Floats) -> str:
    """log pi + H has mean 0 over tokens that were sampled from pi itself."""
    mean, error = surprise.mean(), np.std(surprise) / np.sqrt(surprise.size)
    if abs(mean) <= 4 * error:
        return "the tokens are as likely as if sampled from pi, so the engine's log-probs lack what sampling applied"
    return f"the tokens were sampled from a {'sharper' if mean > 0 else 'flatter'} distribution than pi"
