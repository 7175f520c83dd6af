"""The default guards of a batch itself: that it has tokens, and is not the one before."""

from mismatch_probe.guards.answers import BEAR, STOP, WARN
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.guards.rules.flatline import FlatlineSettings
from mismatch_probe.guards.rules.limit import LimitSettings

BATCH_GUARDS: tuple[GuardSettings, ...] = (
    FlatlineSettings(
        name="no-tokens",
        zero=("response/length_mean",),
        clear_after=5,
        actions=BEAR,
        source="exact: a batch without a token that counts has no gradient, and no other guard sees it",
    ),
    LimitSettings(
        name="repeated-batch",
        metric="response/repeats",
        above=0,
        patience=2,
        actions=((WARN,), (WARN,), (WARN,), (WARN,), (STOP,)),
        source="exact: new samples have other log-probs; ten updates on old ones are more than any loop makes",
    ),
)
