"""Guards a user can leave alone: bands in use elsewhere, each with its source, and levels relative to the run's own."""

from mismatch_probe.guards.actions import (
    BEAR,
    LOG,
    RATE_BEFORE,
    RESYNC,
    ROLLBACK,
    SEND_AGAIN,
    SKIP,
    SMALLER_STEPS,
    STEPS_AS_BEFORE,
    STOP,
    TIGHTEN,
    WARN,
)
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.cusum import CusumSettings
from mismatch_probe.guards.rules.flatline import FlatlineSettings
from mismatch_probe.guards.rules.floor import CanaryFloorSettings
from mismatch_probe.guards.rules.growth import GrowthSettings
from mismatch_probe.guards.rules.limit import LimitSettings
from mismatch_probe.guards.rules.mean import MeanSettings
from mismatch_probe.guards.rules.nonfinite import NonfiniteSettings
from mismatch_probe.guards.run_defaults import BATCH_GUARDS, COURSE_GUARDS, REWARD_GUARDS

_ENGINE = (
    LimitSettings(
        name="stale-engine",
        metric="sync/engine_unchanged",
        above=0,
        clear_after=5,
        actions=SEND_AGAIN,
        source="exact: an engine that took new weights cannot repeat its old log-probs bit for bit",
    ),
    LimitSettings(
        name="unsynced-weights",
        metric="sync/weights_unchanged",
        above=0,
        clear_after=5,
        actions=SEND_AGAIN,
        source="exact: a weight of the engine that is sent other numbers cannot keep its digest",
    ),
    LimitSettings(
        name="other-weights",
        metric="sync/weights_other",
        above=0,
        clear_after=5,
        actions=SEND_AGAIN,
        source="exact: a weight of the engine that once had the digest of what was sent always has it after a sync",
    ),
    GrowthSettings(
        name="engine-weights",
        metric="sync/probe_logit_error",
        ratio=10,
        least=1e-3,
        clear_after=5,
        actions=SEND_AGAIN,
        source="relative to the run: a layer with noise of a fifth raises it 14 times in BF16 and 76 times in FP16",
    ),
    GrowthSettings(
        name="engine-layer",
        metric="sync/probe_logit_error",
        ratio=3,
        least=1e-3,
        patience=2,
        clear_after=5,
        actions=SEND_AGAIN,
        source="relative to the run: clean steps reached 2.0 times their level, a layer with noise of a fifth 14 times",
    ),
    LimitSettings(
        name="temperature",
        metric="mismatch/temperature_fit",
        above=1.1,
        below=0.9,
        patience=2,
        clear_after=5,
        actions=((SKIP,), (STOP,)),
        source="exact: the fit is 1 where both sides use one temperature; a tenth is left for noise",
    ),
    MeanSettings(
        name="sampling",
        metric="mismatch/surprise_mean",
        error="mismatch/surprise_error",
        tolerance=0.002,
        window=128,
        patience=2,
        clear_after=5,
        actions=((SKIP,), (STOP,)),
        source="exact: 0 in expectation for tokens drawn from pi, whatever the log-probs say; rounding is tolerated",
    ),
    LimitSettings(
        name="no-end",
        metric="response/unended_share",
        above=0,
        actions=BEAR,
        source="exact: a response that was not cut ends with a token that ends responses",
    ),
    MeanSettings(
        name="support",
        metric="mismatch/is_ratio_mean",
        error="mismatch/is_ratio_mean_error",
        expected=1.0,
        tolerance=0.002,
        patience=2,
        actions=((WARN,), (LOG,)),
        source="exact: 1 in expectation over mu's tokens where both sides normalise over the same support",
    ),
)

_MISMATCH = (
    NonfiniteSettings(
        name="mismatch-nonfinite",
        metric="mismatch/kl_k3",
        clear_after=5,
        actions=BEAR,
        source="log-probs that are infinite, or missing at over 5 % of the tokens (in train: at any), break the record",
    ),
    LimitSettings(
        name="mismatch-limit",
        metric="mismatch/kl_k3",
        above=0.015,
        patience=2,
        actions=((SKIP, RESYNC), (ROLLBACK,), (STOP,)),
        source="prime-rl, integration tests: mismatch_kl (k3) below 0.015 in each of 20 steps",
    ),
    CanaryFloorSettings(
        name="mismatch-floor",
        metric="mismatch/kl_k3",
        times=100,
        least=1e-6,
        error="mismatch/kl_k3_error",
        patience=2,
        actions=((WARN, RESYNC), (WARN,)),
        source="relative to the canary: a whole format, BF16 for FP16, is 24 times in arXiv 2510.26788",
    ),
    CusumSettings(
        name="mismatch-drift",
        metric="mismatch/kl_k3",
        k=6,
        h=4,
        spread=0.5,
        least=1e-6,
        actions=((WARN,), (LOG,)),
        source="arXiv 2510.26788: a growing mismatch came before every collapse; a clean one may grow 20-fold",
    ),
    LimitSettings(
        name="extreme-above",
        metric="mismatch/prob_diff_max",
        above=0.9,
        patience=3,
        actions=((WARN,), (LOG,)),
        source="arXiv 2510.26788: the extremes of pi - mu went to +1 and -1 before each collapse",
    ),
    LimitSettings(
        name="extreme-below",
        metric="mismatch/prob_diff_min",
        below=-0.9,
        patience=3,
        actions=((WARN,), (LOG,)),
        source="arXiv 2510.26788: the extremes of pi - mu went to +1 and -1 before each collapse",
    ),
    LimitSettings(
        name="sample-size",
        metric="mismatch/ess_token",
        below=0.3,
        patience=2,
        actions=((WARN,), (TIGHTEN,)),
        source="verl, rollout correction: alert at ESS below 0.3",
    ),
)

_UPDATE = (
    GrowthSettings(
        name="learning-rate-jump",
        metric="optim/learning_rate",
        ratio=4,
        reference=4,
        of_highest=1.01,
        clear_after=5,
        actions=((SKIP, RATE_BEFORE), (SKIP, RATE_BEFORE), (STOP,)),
        source="a schedule's steps are smaller, but where it begins anew, at a rate that the run had before",
    ),
    LimitSettings(
        name="update-size",
        metric="update/policy_shift_k3",
        above=0.05,
        error="update/policy_shift_farthest",
        errors=1,
        needs_update=True,
        actions=(*SMALLER_STEPS, (STOP,)),
        source="PPO codes aim at 0.01 to 0.05 nats: an update that moves nine of ten tokens farther is too large",
    ),
    GrowthSettings(
        name="update-jump",
        metric="update/policy_shift_k3",
        ratio=100,
        least=0.01,
        of_highest=10,
        needs_update=True,
        actions=(*STEPS_AS_BEFORE, (STOP,)),
        source="relative to the run: the shift grows with the square of the step, so this step is ten times as large",
    ),
)

_NUMERICS = (
    NonfiniteSettings(
        name="loss-nonfinite",
        metric="optim/loss",
        clear_after=5,
        actions=((SKIP,), (SKIP,), (SKIP,), (ROLLBACK,), (STOP,)),
        source="the forward pass overflowed or the data is broken; smaller loss scales do not help",
    ),
    LimitSettings(
        name="gradient-nonfinite",
        metric="optim/nonfinite_gradients",
        above=0,
        clear_after=5,
        actions=((SKIP,), (SKIP,), (SKIP,), (ROLLBACK,), (STOP,)),
        source="exact: an optimizer turns one such gradient into weights that are none; a loss scale leaves it out",
    ),
    LimitSettings(
        name="overflow",
        metric="optim/overflows_in_a_row",
        above=1,
        actions=((WARN,), (LOG,)),
        source="dynamic loss scaling: one overflow after growth is normal, halving mends it; a second in a row is not",
    ),
    LimitSettings(
        name="overflow-dead",
        metric="optim/overflows_in_a_row",
        above=15,
        actions=((STOP,),),
        source="sixteen halvings, from the usual start of 65,536 down to 1, and still no finite gradient",
    ),
    FlatlineSettings(
        name="dead-run",
        zero=("optim/loss", "optim/grad_norm"),
        nonfinite=("reward/mean",),
        patience=2,
        actions=((WARN,), (STOP,)),
        source="Gemma3-12B under FP16 in TRL: loss 0, grad_norm 0, reward NaN",
    ),
    FlatlineSettings(
        name="underflow",
        zero=("optim/grad_norm",),
        nonzero=("optim/loss",),
        patience=2,
        actions=((WARN,), (LOG,)),
        source="FP16 flushes gradients near 1e-9 to zero; where all answers score alike the loss is zero too",
    ),
    FlatlineSettings(
        name="truncated",
        zero=("optim/grad_norm",),
        at_least={"response/truncated_share": 0.9},
        patience=3,
        clear_after=1,
        actions=((WARN,), (WARN,), (WARN,), (STOP,)),
        source="judgement: twelve steps of cut responses without a gradient; one step that learns clears it",
    ),
    LimitSettings(
        name="all-truncated",
        metric="response/truncated_share",
        above=0.99,
        patience=8,
        actions=((WARN,), (LOG,)),
        source="judgement: in eight steps hardly a response ended, so no reward of a whole answer was given",
    ),
)

DEFAULT_GUARDS: tuple[GuardSettings, ...] = (
    *BATCH_GUARDS,
    *_ENGINE,
    *_MISMATCH,
    *_UPDATE,
    *_NUMERICS,
    *REWARD_GUARDS,
    *COURSE_GUARDS,
)
