"""What each part in higher precision removed of the token KL: paired on the same ids, clustered by prompt."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from mismatch_probe.localize.workspace import TrialNotes
from mismatch_probe.records.localize import Intervention, Interventions, Side
from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale
from mismatch_probe.stats.sequences import Floats

TOGETHER: Final = "all parts together"
ONE_AT_A_TIME: Final = "one response at a time"
_WHOLE: Final = ("everything", ONE_AT_A_TIME)
"""What is tried and is no part among those that are raised together."""
ReadLeg = Callable[[str], Floats]


def judge_interventions(
    trials: Sequence[TrialNotes], estimator: Estimator, read: ReadLeg, left_out: dict[str, str]
) -> Interventions:
    """`read` gives the log-probs [T] of a leg by its name; a trial without a part is its side as it is.

    A part of the engine is held against the training path as it is, and the reverse; what the engine's decoding and its
    replay differ in is on both sides of each contrast.
    """
    plain = {trial.side: trial for trial in trials if not trial.part}
    logprobs = {side: read(trial.leg) for side, trial in plain.items()}
    log_pi, log_mu = read("train"), read("infer")
    found = []
    for trial in trials:
        if not trial.part:
            continue
        raised = read(trial.leg)
        pairs = (
            (raised - log_mu, logprobs["train"] - log_mu)
            if trial.side == "train"
            else (log_pi - raised, log_pi - logprobs["infer"])
        )
        found.append(_judged(trial, plain[trial.side], estimator, *map(k3_terms, pairs)))
    single = [one for one in found if one.part != TOGETHER and not one.part.startswith("layer ")]
    return Interventions(
        ranked=sorted((one for one in found if one.part != TOGETHER), key=lambda one: one.removed.value, reverse=True),
        together=[one for one in found if one.part == TOGETHER],
        sum_of_removed=_sums(single),
        left_out=left_out,
    )


def _judged(trial: TrialNotes, plain: TrialNotes, estimator: Estimator, raised: Floats, before: Floats) -> Intervention:
    kl = estimator.mean(raised, "token", Scale.POSITIVE)
    removed = estimator.smooth(
        lambda with_part, without: 1 - with_part / without,
        [estimator.totals(raised, "token"), estimator.totals(before, "token")],
        "token",
    )
    assert kl is not None
    assert removed is not None, "sides that agree bit for bit are not tried"
    return Intervention(
        part=trial.part,
        side=trial.side,
        kl_k3=kl,
        removed=removed,
        slower=trial.seconds / plain.seconds - 1,
        extra_bytes=trial.extra_bytes,
    )


def _sums(single: Sequence[Intervention]) -> dict[Side, float]:
    """What the parts that are raised together removed one by one, added up."""
    sides: dict[Side, float] = {}
    for one in single:
        if one.part not in _WHOLE:
            sides[one.side] = sides.get(one.side, 0.0) + one.removed.value
    return {side: float(np.round(value, 4)) for side, value in sides.items()}
