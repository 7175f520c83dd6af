"""What it looks like when the sides do not score the same tokens by the same weights; None where a window does not."""

import statistics

from mismatch_probe.guards.diagnosis import (
    FAR_MAKES_IT,
    LARGEST_ROUNDING_NATS,
    LEAST_PROBE_ERROR,
    PROBE_ERROR,
    PROBE_JUMP,
    SHIFT_RESTORES,
    Diagnosis,
    EndCause,
    Window,
    logit_slopes,
    probe_agrees,
    weights_are_equal,
)
from mismatch_probe.guards.rules.base import write_value
from mismatch_probe.notation import write_percent
from mismatch_probe.stats.pair_totals import LEAST_RESTORED

_UNLIKE = 0.3
_LABEL_NATS = 0.5
_ALIKE = 0.25
_MOST_RESPONSES = 0.5
_ABOVE_BELOW = 0.1
_SOUND_BEFORE = 0.1
_GROWN = 3.0
_MOST_GROWN = 20.0
_SYMMETRIC_ERRORS = 5.0
_K3_OF_RMS = (0.5, 2.0)
_ENGINE_K3 = 0.015


def mispaired(window: Window) -> Diagnosis | None:
    """The responses that are far apart fit the log-probs of other responses of their batch."""
    share = window.last("mismatch/exchanged_share")
    if share is None or not share >= LEAST_RESTORED:
        return None
    return Diagnosis(
        EndCause.MISPAIRED,
        f"Responses are mispaired: {write_percent(share)} of those whose sides are far apart carry the log-probs of "
        "another response of the batch.",
        ("Join both sides by a response id, not by order; look for a sort, a shuffle or a drop between them.",),
    )


def label_offset(window: Window) -> Diagnosis | None:
    """The sides' log-probs are of other tokens: those of one fit the other's once they are shifted by one.

    Or pi is asked for other tokens. The two then do not go together, and pi is surprised by just what mu finds likely:
    mean(log mu) is minus pi's entropy, which an engine with other weights would have no reason to keep to.
    """
    left, far = window.last("mismatch/shift_left"), window.last("mismatch/logit_error")
    advice = ("Look for labels shifted by one, padding on the wrong side, and responses paired with other prompts.",)
    if left is not None and far is not None and left <= SHIFT_RESTORES and far > LARGEST_ROUNDING_NATS:
        return Diagnosis(
            EndCause.LABEL_OFFSET,
            "The log-probs of one side are shifted by one token: moved back, they are apart by "
            f"{write_value(left)} times as much.",
            advice,
        )
    pearson, behind = window.last("mismatch/prob_pearson"), window.last("mismatch/kl_k1")
    excess = window.last("mismatch/surprise_excess")
    if pearson is None or behind is None or excess is None or not pearson < _UNLIKE or excess < _LABEL_NATS:
        return None
    if not abs(behind - excess) <= _ALIKE * excess:
        return None
    return Diagnosis(
        EndCause.LABEL_OFFSET,
        "The trainer scores other tokens than the engine sampled: the two sides' probabilities have a correlation of "
        f"{write_value(pearson)}, and pi finds them {write_value(excess)} nats less likely than its entropy says.",
        advice,
    )


def tokens_replaced(window: Window) -> Diagnosis | None:
    """In most responses both sides agree up to a token that mu finds likely and pi does not."""
    names = ("far_responses_share", "far_below_share", "far_above_share", "far_squares_share", "error_before_far")
    seen = [window.last(f"mismatch/{name}") for name in names]
    if any(value is None for value in seen):
        return None
    responses, below, above, squares, before = (value or 0.0 for value in seen)
    if responses < _MOST_RESPONSES or above > _ABOVE_BELOW * below or squares < FAR_MAKES_IT or before > _SOUND_BEFORE:
        return None
    return Diagnosis(
        EndCause.TOKENS_REPLACED,
        f"The trainer scores other tokens than the engine sampled: in {write_percent(responses)} of the responses both "
        f"sides agree up to a token that pi finds 20 times less likely than mu; before it logits differ by "
        f"{write_value(before)} times as much as on average.",
        ("Hand the sampled token ids to the trainer as they are: no decoding, encoding or replacing between.",),
    )


def computation(window: Window) -> Diagnosis | None:
    """The probe is far apart right after a sync although digests say that the engine holds what it was sent."""
    probes = window.finite(PROBE_ERROR)
    if not weights_are_equal(window) or not probes:
        return None
    usual, k3 = min(probes), window.last("sync/probe_k3") or 0.0
    if probes[-1] <= max(LEAST_PROBE_ERROR, PROBE_JUMP * usual) and k3 <= _ENGINE_K3:
        return None
    return Diagnosis(
        EndCause.COMPUTATION,
        "Both sides hold the same weights and compute other numbers: right after a sync their logits of the probe "
        f"tokens are {write_value(probes[-1])} nats apart (KL {write_value(k3)}), and no digest of a weight differs.",
        (
            "Compare what is no weight: RoPE base and scaling, position ids, attention masks, soft caps, formats.",
            "`mismatch-probe localize` says which layer departs first.",
        ),
    )


def other_scores(window: Window) -> Diagnosis | None:
    """Both sides agree on the probe, whose tokens they score anew, and not on what was recorded of the responses."""
    error, k3 = window.last("mismatch/logit_error"), window.last("mismatch/kl_k3")
    probe = window.last("sync/probe_k3")
    if error is None or k3 is None or probe is None or not probe_agrees(window):
        return None
    if error <= _GROWN * LARGEST_ROUNDING_NATS:
        return None
    return Diagnosis(
        EndCause.OTHER_SCORES,
        f"Both sides agree on the probe (KL {write_value(probe)}) and not on the responses (KL {write_value(k3)}, "
        f"logits {write_value(error)} nats apart): the log-probs of these are of other weights or of other tokens.",
        ("See that both sides' log-probs of a step come from the weights of that step, and from the same token ids.",),
    )


def precision_drift(window: Window) -> Diagnosis | None:
    """The mismatch grows at weights that are known to be equal, by symmetric errors of the size of a format's rounding.

    Small errors d have a k3 of half their mean square, a mean of pi/mu of 1, and follow neither a shift nor the scale
    of logits.
    """
    levels = [level for level in window.finite("mismatch/kl_k3") if level > 0]
    half = max(1, len(levels) // 2)
    start, end = (statistics.median(part) if part else 0.0 for part in (levels[:half], levels[-half:]))
    if window.events and not any(event.metric.startswith("mismatch/") for event in window.events):
        return None
    if len(levels) < 4 or not _GROWN * start <= end <= _MOST_GROWN * start:
        return None
    if not (weights_are_equal(window) or probe_is_level(window)) or logit_slopes(window):
        return None
    error, rms, k3 = (window.last(f"mismatch/{name}") for name in ("logit_error", "logprob_diff_rms", "kl_k3"))
    if error is None or rms is None or k3 is None or error > LARGEST_ROUNDING_NATS:
        return None
    ratio, ratio_error = window.last("mismatch/is_ratio_mean"), window.last("mismatch/is_ratio_mean_error")
    is_symmetric = ratio is not None and ratio_error is not None and abs(ratio - 1) <= _SYMMETRIC_ERRORS * ratio_error
    if not is_symmetric or not _K3_OF_RMS[0] <= k3 / (rms**2 / 2) <= _K3_OF_RMS[1]:
        return None
    return Diagnosis(
        EndCause.PRECISION_DRIFT,
        f"The mismatch of the two sides grows with equal weights: k3 went from {write_value(start)} to "
        f"{write_value(end)} nats in {len(levels)} steps, by errors of a logit of {write_value(error)} nats that are "
        "as often above as below.",
        ("Use fp16 or fp32 on both sides, or --infer-dtype fp32, or an objective that rejects whole sequences.",),
    )


def probe_is_level(window: Window) -> bool:
    """Whether the probe after each sync stayed where it was, within rounding."""
    probes = window.finite(PROBE_ERROR)
    return bool(probes) and max(probes) <= min(
        LARGEST_ROUNDING_NATS, max(LEAST_PROBE_ERROR, PROBE_JUMP * statistics.median(probes))
    )
