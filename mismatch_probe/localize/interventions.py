"""What each part in higher precision removed of the token KL: paired on the same ids, clustered by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

from mismatch_probe.localize.workspace import TrialNotes
from mismatch_probe.records.activations import is_layer
from mismatch_probe.records.localize import Intervention, Interventions
from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.results import Estimate
from mismatch_probe.stats.sequences import Floats

TOGETHER: Final = "all parts together"
_WHOLE: Final = ("everything", TOGETHER)
"""What is no part among those that are in FP32 together; nor is a single layer."""
ONE_AT_A_TIME: Final = "one response at a time"
ReadLeg = Callable[[str], Floats]


def judge_interventions(
    trials: Sequence[TrialNotes], estimator: Estimator, read: ReadLeg, left_out: dict[str, str]
) -> Interventions:
    """`read` gives the log-probs [T] of a leg by its name; a trial without a part is its side as it is.

    A part of the engine is held against the training path as it is, and the reverse; what the engine's decoding and its
    replay differ in is on both sides of each contrast. A part tried on both sides is also in FP32 on both.
    """
    legs = {(trial.side, trial.part): trial for trial in trials}
    log_pi, log_mu = read("train"), read("infer")
    judged = []
    for (side, part), trial in legs.items():
        if not part:
            continue
        tried, plain = read(trial.leg), legs[side, ""]
        after = tried - log_mu if side == "train" else log_pi - tried
        before = read(plain.leg) - log_mu if side == "train" else log_pi - read(plain.leg)
        judged.append(_judged(part, side, [trial], [plain], estimator, after, before))
        if side == "train" and ("infer", part) in legs:
            other, other_plain = legs["infer", part], legs["infer", ""]
            after, before = tried - read(other.leg), read(plain.leg) - read(other_plain.leg)
            judged.append(_judged(part, "both", [trial, other], [plain, other_plain], estimator, after, before))
    parts = [
        trial for trial in judged if trial.side == "train" and trial.part not in _WHOLE and not is_layer(trial.part)
    ]
    return Interventions(
        ranked=sorted((trial for trial in judged if trial.part != TOGETHER), key=lambda trial: -trial.removed.value),
        together=next((trial for trial in judged if trial.part == TOGETHER), None),
        sum_of_removed=sum(part.removed.value for part in parts) if parts else None,
        left_out=left_out,
    )


def _judged(
    part: str,
    side: Literal["infer", "train", "both"],
    trials: Sequence[TrialNotes],
    plain: Sequence[TrialNotes],
    estimator: Estimator,
    after: Floats,
    before: Floats,
) -> Intervention:
    """From the log-ratios [T] with the part in FP32 and without."""
    terms_after, terms_before = k3_terms(after), k3_terms(before)
    kl = estimator.mean(terms_after, "token", Scale.POSITIVE)
    totals = [estimator.totals(terms, "token") for terms in (terms_after, terms_before)]
    removed = estimator.smooth(lambda with_part, without: 1 - with_part / without, totals, "token")
    assert kl is not None
    assert removed is not None, "sides that agree bit for bit are not tried"
    return Intervention(
        part=part,
        side=side,
        kl_k3=kl,
        removed=_at_most_all(removed),
        slower=sum(trial.seconds for trial in trials) / sum(trial.seconds for trial in plain) - 1,
        extra_bytes=sum(trial.extra_bytes for trial in trials),
    )


def _at_most_all(removed: Estimate) -> Estimate:
    """No part removes more than there is, so neither does its interval."""
    return removed if removed.high is None else replace(removed, high=min(removed.high, 1.0))
