"""The default guards of rewards."""

from mismatch_probe.guards.answers import BEAR, LEAVE_OUT, LOG, PATIENT, ROLLBACK, SKIP, STOP, TENTH_OF_RATE, WARN
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.beyond import BeyondSettings
from mismatch_probe.guards.rules.flatline import FlatlineSettings
from mismatch_probe.guards.rules.growth import GrowthSettings
from mismatch_probe.guards.rules.limit import LimitSettings
from mismatch_probe.guards.rules.mean import MeanSettings

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
