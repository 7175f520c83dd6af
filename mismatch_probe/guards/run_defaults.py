"""The default guards of batches, rewards, and the course of a run."""

from mismatch_probe.guards.actions import BEAR, LEAVE_OUT, LOG, PATIENT, ROLLBACK, SKIP, STOP, TENTH_OF_RATE, WARN
from mismatch_probe.guards.rewards import NOT_NEW, REMEMBERED, REPEATS, RETURNED
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.bounds import BeyondSettings, FlatlineSettings, LimitSettings
from mismatch_probe.guards.rules.growth import GrowthSettings
from mismatch_probe.guards.rules.mean import MeanSettings
from mismatch_probe.guards.rules.trend import TrendSettings

BATCH_GUARDS: tuple[GuardSettings, ...] = (
    FlatlineSettings(
        name="no-tokens",
        zero=("response/length_mean",),
        clear_after=5,
        actions=BEAR,
        source="exact: a batch without a token that counts has no gradient, and no other guard sees it",
    ),
    LimitSettings(
        name="copied-side",
        metric="mismatch/copied_share",
        above=0,
        actions=((WARN,), (LOG,)),
        source="measured: two computations in 16 bits are equal bit for bit at 2 % of the tokens, in FP32 at a third",
    ),
    LimitSettings(
        name="copied-rows",
        metric="mismatch/copied_rows_share",
        above=0,
        actions=((WARN,), (LOG,)),
        source="the same, of single responses: beside the others chance makes one such copy in a million",
    ),
    LimitSettings(
        name="repeated-batch",
        metric=REPEATS,
        above=0,
        patience=2,
        actions=((WARN,), (WARN,), (WARN,), (WARN,), (STOP,)),
        source="exact: new samples have other log-probs; ten updates on old ones are more than any loop makes",
    ),
    LimitSettings(
        name="returned-batch",
        metric=RETURNED,
        above=1,
        actions=((WARN,), (LOG,)),
        source="exact: new samples have other log-probs; of the 64 batches before",
    ),
    LimitSettings(
        name="no-new-batch",
        metric=NOT_NEW,
        above=REMEMBERED - 1,
        actions=((STOP,),),
        source="exact: in 64 steps no batch was new",
    ),
)


_PATIENCE = 4

COURSE_GUARDS: tuple[GuardSettings, ...] = (
    BeyondSettings(
        name="gradient-size",
        metric="optim/grad_norm",
        most="optim/grad_norm",
        ratio=20,
        reference=64,
        patience=2,
        actions=((WARN,), (LOG,)),
        source="relative to the run: a clean step reached 2.7 times the largest of the steps before; a scale is 1,024",
    ),
    TrendSettings(
        name="entropy-collapse",
        metric="policy/entropy",
        ratio=4,
        other="reward/mean",
        other_error="reward/mean_error",
        patience=_PATIENCE,
        actions=((WARN,), (LOG,)),
        source="judgement: a policy that gets sure pays for it with its reward; clean runs lost a third in 60 steps",
    ),
    TrendSettings(
        name="entropy-lost",
        metric="policy/entropy",
        ratio=10,
        window=24,
        patience=_PATIENCE,
        actions=((WARN,), (LOG,)),
        source="judgement: nine tenths within 24 steps; clean runs lost a third of their entropy in 60",
    ),
    TrendSettings(
        name="reward-decline",
        metric="reward/mean",
        ratio=2,
        least=0.2,
        error="reward/mean_error",
        patience=_PATIENCE,
        needs_update=True,
        actions=((WARN,), (ROLLBACK, TENTH_OF_RATE), (STOP,)),
        source="judgement: half of a level lost so slowly, or from so few responses, that reward-collapse waits",
    ),
    *(
        TrendSettings(
            name=f"{what}-falls",
            metric="mismatch/kl_k3",
            direction="up",
            ratio=2,
            errors=3,
            other=f"correction/{what}_share",
            other_errors=3,
            patience=_PATIENCE,
            actions=((WARN,), (LOG,)),
            source="KPop (Ring team, 2026): a fixed band bounds ever fewer tokens while the mismatch grows",
        )
        for what in ("rejected", "clipped")
    ),
)


REWARD_GUARDS: tuple[GuardSettings, ...] = (
    LimitSettings(
        name="reward-nonfinite",
        metric="reward/nonfinite",
        above=0,
        clear_after=2,
        actions=(*((WARN, LEAVE_OUT),) * PATIENT, (STOP,)),
        source="a reward that is no number makes the gradient none; its response leaves the loss",
    ),
    GrowthSettings(
        name="reward-seconds",
        metric="time/reward_seconds",
        ratio=10,
        least=1.0,
        patience=2,
        actions=((WARN,), (LOG,)),
        source="judgement: rewards take ten times as long as they did, and longer than a second a step",
    ),
    GrowthSettings(
        name="reward-scale",
        metric="reward/largest",
        ratio=1e5,
        needs=4,
        actions=BEAR,
        source="judgement: a reward 100,000 times the largest of a usual step is a mistake, were it the only one",
    ),
    BeyondSettings(
        name="reward-range",
        metric="reward/typical",
        most="reward/largest",
        ratio=10,
        patience=2,
        actions=((SKIP,), (STOP,)),
        source="judgement: where the usual reward is tenfold the largest one before, it is another function",
    ),
    LimitSettings(
        name="reward-repeat",
        metric="reward/unrepeated",
        above=0,
        patience=3,
        actions=((WARN,), (LOG,)),
        source="exact for a function of the response alone: asked again, it gives the reward that was learnt from",
    ),
    MeanSettings(
        name="reward-pairing",
        metric="reward/mispaired",
        error="reward/mispaired_error",
        errors=4.0,
        actions=((ROLLBACK,), (STOP,)),
        source="exact: a function that judges by chance agrees with its first answer as often as with its second",
    ),
    FlatlineSettings(
        name="constant-reward",
        zero=("reward/whole_range",),
        patience=16,
        actions=((WARN,), (LOG,)),
        source="judgement: what was not cut earned the same in sixteen steps: the task is solved, or nothing is judged",
    ),
    FlatlineSettings(
        name="flat-groups",
        zero=("optim/grad_norm",),
        at_least={"reward/flat_groups_share": 1.0},
        patience=16,
        actions=((WARN,), (LOG,)),
        source="judgement: in sixteen steps no prompt's responses earned different rewards, and nothing was learnt",
    ),
    GrowthSettings(
        name="reward-collapse",
        metric="reward/mean",
        direction="down",
        ratio=2,
        window=3,
        reference=16,
        least=0.2,
        error="reward/mean_error",
        patience=2,
        needs_update=True,
        actions=((WARN,), (ROLLBACK, TENTH_OF_RATE), (STOP,)),
        source="judgement: half of a level above 0.2 lost, and not by one batch or by few responses",
    ),
)
