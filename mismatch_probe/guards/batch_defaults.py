"""The default guards of a batch itself: that it has tokens, two sides, and is none of those before."""

from mismatch_probe.guards.answers import BEAR, LOG, STOP, WARN
from mismatch_probe.guards.repeats import NOT_NEW, REMEMBERED, REPEATS, RETURNED
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
