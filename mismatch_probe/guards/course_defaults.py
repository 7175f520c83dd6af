"""The default guards of a run's course: what changes too slowly, or in too large steps, for the others."""

from mismatch_probe.guards.answers import LOG, ROLLBACK, STOP, TENTH_OF_RATE, WARN
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.beyond import BeyondSettings
from mismatch_probe.guards.rules.trend import TrendSettings

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
