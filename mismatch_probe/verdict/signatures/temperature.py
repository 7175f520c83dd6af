"""A temperature applied on one side only, or a logit scale that differs.

Dividing logits by T turns p into p^(1/T) / Z, so log mu = b log pi - log Z with b = T_pi / T_mu and a Z that is the
same for every token of one context. To second order in b - 1, log Z = -(b - 1) H + (b - 1)^2 V / 2 with pi's entropy H
and the variance V of its log-probs (the cumulant generating function of log pi). So d = (1 - b) (log pi + H) + (a
function of the context that vanishes with H): linear in the token's own log-prob within a context, which no rounding,
prompt or weight error is.
"""

import numpy as np

from mismatch_probe.notation import write_number, write_percent
from mismatch_probe.records.summary import Cause
from mismatch_probe.stats.sequences import Floats
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


def temperature(found: Disagreement) -> Cause | None:
    """The cause where d follows the logit scale; None elsewhere, for few tokens, and without pi's entropy."""
    pair = found.pair
    if pair.entropy_pi is None or found.is_rounding or pair.sequences.num_tokens < LEAST_TOKENS:
        return None
    entropy = pair.entropy_pi.astype(np.float64)
    context = np.stack([entropy, entropy**2], axis=1)
    surprise = pair.log_pi + entropy
    without = pair.diff - _fitted(context, pair.diff)[0]
    columns = np.column_stack([surprise, context])
    fitted, slopes = _fitted(columns, pair.diff)
    left = root_mean_square(pair.diff - fitted)
    ratio = float(1 - slopes[0])
    explains = left <= max(UNEXPLAINED_RMS * found.rms, 2 * found.floor) and root_mean_square(fitted) > 2 * found.floor
    own = 1 - left**2 / root_mean_square(without) ** 2
    if not explains or own < OWN_SHARE or not RATIOS[0] < ratio < RATIOS[1] or not _halves_agree(columns, pair.diff):
        return None
    return Code.TEMPERATURE.cause(
        ratio=ratio,
        evidence=[
            f"d follows the logit scale: a temperature ratio of {ratio:.4g} explains "
            f"{write_percent(1 - left**2 / found.rms**2)} of its square and leaves {write_number(left)} nats",
            _sampled_from(float(surprise.mean()), float(np.std(surprise) / np.sqrt(surprise.size))),
        ],
        advice=[
            "Divide the training path's logits by the sampling temperature, or take processed log-probs from the "
            "engine (vLLM: logprobs_mode=processed_logprobs)."
        ],
    )


def _fitted(columns: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Least squares without an intercept: what the columns give for each value, and their coefficients."""
    coefficients = np.asarray(np.linalg.lstsq(columns.T @ columns, columns.T @ values, rcond=None)[0], dtype=np.float64)
    return np.asarray(columns @ coefficients), coefficients


def _halves_agree(columns: Floats, values: Floats) -> bool:
    """Whether certain and uncertain contexts tell the same slope, as one temperature makes them."""
    uncertain = columns[:, 1] > np.median(columns[:, 1])
    low, high = (_fitted(columns[half], values[half])[1][0] for half in (~uncertain, uncertain))
    return bool(abs(low - high) <= HALVES_AGREE * max(abs(low), abs(high)))


def _sampled_from(mean_surprise: float, error: float) -> str:
    """log pi + H has mean 0 over tokens that were sampled from pi itself."""
    if abs(mean_surprise) <= 4 * error:
        return "the tokens are as likely as if sampled from pi, so the engine's log-probs lack what sampling applied"
    sharper = "sharper" if mean_surprise > 0 else "flatter"
    return f"the tokens were sampled from a {sharper} distribution than pi"
