"""Faults that heal by themselves after 1 to 3 steps: they must be seen, and the run must go on."""

from functools import partial
from typing import Final

from benchmarks.training_faults.fault import Fault
from benchmarks.training_faults.reward_faults import reward_given, reward_slow, rewards_lost
from benchmarks.training_faults.sampling_faults import labels_shifted, sampling_changed
from benchmarks.training_faults.sync_faults import layer_scaled, sync_late, sync_skipped
from benchmarks.training_faults.update_faults import applied_rate, gradients_overflow
from mismatch_probe.causes.training import EndCause

_STALE: Final = (("stale-engine", "unsynced-weights", "other-weights"), (EndCause.STALE_SYNC, EndCause.PARTIAL_SYNC))
_LOST: Final = (("reward-nonfinite",), (EndCause.REWARD_NAN,))
_HEALING_STEPS: Final = 7
"""Three steps that are three apart, and those between them."""

HEALING: Final[tuple[Fault, ...]] = (
    Fault(
        "heals: one reward is NaN",
        "three steps, each three apart",
        partial(rewards_lost, rows=1, period=3),
        *_LOST,
        lasts=_HEALING_STEPS,
        heals=True,
    ),
    Fault("heals: one reward is NaN", "each step", partial(rewards_lost, rows=1), *_LOST, heals=True),
    Fault(
        "heals: rewards",
        "all infinite",
        partial(reward_given, bad=lambda right, response: float("inf")),
        *_LOST,
        heals=True,
    ),
    Fault(
        "heals: rewards",
        "too slow for one in 8",
        reward_slow,
        ("reward-nonfinite", "reward-seconds"),
        (EndCause.REWARD_LATE,),
        heals=True,
    ),
    Fault("heals: sync", "skipped", sync_skipped, *_STALE, heals=True),
    Fault("heals: sync", "late by a step", sync_late, *_STALE, heals=True),
    Fault("heals: sync", "one layer x 1.1", partial(layer_scaled, factor=1.1), *_STALE, heals=True),
    Fault(
        "heals: engine",
        "samples at temperature 1.2, its log-probs show it",
        partial(sampling_changed, temperature=1.2),
        ("sampling", "support", "temperature"),
        (EndCause.TEMPERATURE,),
        heals=True,
    ),
    Fault(
        "heals: labels",
        "shifted by one",
        labels_shifted,
        ("sampling", "mismatch-limit"),
        (EndCause.LABEL_OFFSET,),
        heals=True,
    ),
    Fault(
        "heals: gradients",
        "infinite",
        gradients_overflow,
        ("overflow",),
        (EndCause.FP16_DEAD, EndCause.NONFINITE_GRADIENT),
        heals=True,
    ),
    Fault(
        "heals: learning rate, applied unseen",
        "x 100",
        partial(applied_rate, factor=100.0),
        ("update-size", "update-jump", "reward-collapse"),
        (EndCause.LEARNING_RATE,),
        heals=True,
    ),
)
