"""The faults: what goes wrong, how strongly, which guard must see it, and which cause the diagnosis must name."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from benchmarks.training_faults.course_faults import LONGER, UNSURE, entropy_penalised, problems_harder
from benchmarks.training_faults.fault import Fault, at_strengths
from benchmarks.training_faults.healing_faults import HEALING
from benchmarks.training_faults.reward_faults import reward_given, reward_nan, reward_slow, rewards_shuffled
from benchmarks.training_faults.sampling_faults import (
    all_cut,
    ends_dropped,
    labels_shifted,
    sampling_changed,
    sampling_hidden,
)
from benchmarks.training_faults.scoring_faults import (
    batch_repeated,
    mu_shifted,
    positions_scaled,
    scored_by_old_weights,
    token_replaced,
)
from benchmarks.training_faults.sync_faults import (
    every_third_sync_skipped,
    first_sync_skipped,
    last_layer_kept,
    layer_perturbed,
    layer_scaled,
    stale_cache,
    sync_skipped,
)
from benchmarks.training_faults.update_faults import (
    activations,
    applied_rate,
    gradients_changed,
    gradients_overflow,
    loss_scale,
    nothing,
    scheduled_rate,
)
from mismatch_probe.causes.training import EndCause
from mismatch_probe.dtypes import Dtype


def _rewards(strength: str, bad: Callable[[float, str], Any], guards: tuple[str, ...], *causes: EndCause) -> Fault:
    return Fault("reward function", strength, partial(reward_given, bad=bad), guards, causes)


_TOO_LARGE: Final = (
    ("update-size", "update-jump", "reward-collapse"),
    (EndCause.LEARNING_RATE, EndCause.HARMFUL_UPDATES),
)
_PARTIAL: Final = (("unsynced-weights", "other-weights"), (EndCause.PARTIAL_SYNC, EndCause.STALE_SYNC))
_STALE: Final = (("stale-engine", "unsynced-weights", "other-weights"), (EndCause.STALE_SYNC, EndCause.PARTIAL_SYNC))
_HIDDEN: Final = (("sampling", "support", "temperature"), (EndCause.TEMPERATURE,))
_APART: Final = ("temperature", "sampling", "mismatch-limit", "mismatch-floor", "mismatch-drift")

FAULTS: Final[tuple[Fault, ...]] = (
    _rewards("inf", lambda right, response: float("inf"), ("reward-nonfinite",), EndCause.REWARD_NAN),
    Fault("reward function", "NaN for one in 8", reward_nan, ("reward-nonfinite",), (EndCause.REWARD_NAN,)),
    _rewards("a string", lambda right, response: str(right), ()),
    _rewards("None", lambda right, response: None, ()),
    _rewards("constant", lambda right, response: 0.5, ("constant-reward", "flat-groups"), EndCause.FLAT),
    _rewards(
        "all zero",
        lambda right, response: 0.0,
        ("constant-reward", "flat-groups", "reward-collapse"),
        EndCause.FLAT,
        EndCause.REWARD_CHANGED,
    ),
    _rewards("x 1e30", lambda right, response: 1e30 * right, ("reward-scale",), EndCause.REWARD_SCALE),
    _rewards(
        "length of the response", lambda right, response: float(len(response)), ("reward-range",), EndCause.REWARD_SCALE
    ),
    Fault(
        "reward function",
        "too slow for one in 8",
        reward_slow,
        ("reward-nonfinite", "reward-seconds"),
        (EndCause.REWARD_LATE,),
    ),
    Fault("rewards shuffled", "in each step", rewards_shuffled, ("reward-repeat",), (EndCause.REWARD_UNREPEATED,)),
    *at_strengths(
        "one layer on its way to the engine",
        layer_scaled,
        {"x 1.01": {"factor": 1.01}, "x 1.1": {"factor": 1.1}},
        *_PARTIAL,
    ),
    Fault("last layer", "never synced", last_layer_kept, *_PARTIAL),
    Fault("sync skipped", "every third step", every_third_sync_skipped, *_STALE),
    Fault(
        "stale prefix cache",
        "from the onset",
        stale_cache,
        (),
        (),
        settings={
            "engine": {"prefix_caching": True, "args": {"block_size": 32}},
            "task": {"source": "sums:terms=6", "num_problems": 8},
            "rollout": {"max_new_tokens": 80},
        },
    ),
    *at_strengths(
        "engine samples otherwise, its log-probs show it",
        sampling_changed,
        {"temperature 0.8": {"temperature": 0.8}, "temperature 1.2": {"temperature": 1.2}, "top-p 0.9": {"top_p": 0.9}},
        *_HIDDEN,
    ),
    *at_strengths(
        "engine samples otherwise, its log-probs hide it",
        sampling_hidden,
        {
            "temperature 0.8": {"temperature": 0.8},
            "top-p 0.9": {"top_p": 0.9},
            "repetition penalty 1.2": {"repetition_penalty": 1.2},
        },
        *_HIDDEN,
    ),
    *at_strengths(
        "learning rate, applied unseen",
        applied_rate,
        {f"x {value:g}": {"factor": value} for value in (8.0, 10.0, 20.0, 100.0)},
        *_TOO_LARGE,
    ),
    Fault(
        "learning rate, from the start",
        "1e-3",
        nothing,
        *_TOO_LARGE,
        settings={"optimizer": {"learning_rate": 1e-3}},
        from_start=True,
    ),
    Fault(
        "activations",
        "last norm x 1e6",
        activations,
        ("loss-nonfinite", "mismatch-nonfinite", "mismatch-limit", "update-size"),
        (EndCause.FP16_DEAD, EndCause.NONFINITE_GRADIENT, EndCause.LEARNING_RATE),
    ),
    Fault(
        "gradients",
        "infinite in every update",
        gradients_overflow,
        ("overflow", "gradient-nonfinite"),
        (EndCause.FP16_DEAD, EndCause.NONFINITE_GRADIENT),
    ),
    Fault("labels shifted", "by one", labels_shifted, ("sampling", "mismatch-limit"), (EndCause.LABEL_OFFSET,)),
    Fault("end of responses", "dropped", ends_dropped, ("no-end",), (EndCause.NO_END,)),
    Fault(
        "responses",
        "all cut",
        partial(all_cut, tokens=6),
        ("truncated", "all-truncated", "reward-collapse"),
        (EndCause.TRUNCATED,),
    ),
    Fault("one layer on its way to the engine", "noise of 20%", partial(layer_perturbed, noise=0.2), *_PARTIAL),
    Fault("sync skipped", "every sync", sync_skipped, *_STALE),
    Fault("sync skipped", "once", first_sync_skipped, *_STALE, lasts=1, heals=True),
    Fault(
        "learning rate, as scheduled",
        "x 100",
        partial(scheduled_rate, factor=100.0),
        ("learning-rate-jump",),
        (EndCause.LEARNING_RATE,),
    ),
    Fault(
        "gradients",
        "loss scale of 2^60",
        loss_scale,
        ("overflow",),
        (EndCause.FP16_DEAD,),
        lasts=1,
        heals=True,
        dtypes=(Dtype.FP16,),
    ),
    *at_strengths(
        "positions of the training path (RoPE)",
        positions_scaled,
        {f"angles x {value:g}": {"factor": value} for value in (1.01, 1.1)},
        ("engine-weights", "engine-layer"),
        (EndCause.COMPUTATION,),
    ),
    Fault(
        "log-probs of the trainer",
        "by the weights of the onset",
        scored_by_old_weights,
        ("mismatch-limit", "mismatch-floor", "mismatch-drift"),
        (EndCause.OTHER_SCORES,),
    ),
    Fault("log-probs of the engine", "one token late", mu_shifted, _APART, (EndCause.LABEL_OFFSET,)),
    Fault("a batch", "repeated", batch_repeated, (*_APART, "repeated-batch"), (EndCause.BATCH_REPEATED,)),
    Fault("a token of each response", "replaced", token_replaced, _APART, (EndCause.TOKENS_REPLACED,)),
    Fault(
        "gradients",
        "never unscaled, x 4096",
        partial(gradients_changed, factor=4096.0),
        ("gradient-size",),
        (EndCause.GRADIENT_SCALE,),
    ),
    Fault(
        "gradients",
        "of the other sign",
        partial(gradients_changed, factor=-1.0),
        ("reward-collapse", "reward-decline"),
        (EndCause.HARMFUL_UPDATES,),
    ),
    Fault(
        "problems",
        "harder, sums of 8 terms",
        partial(problems_harder, source="sums:terms=8"),
        ("reward-collapse", "reward-decline"),
        (EndCause.REWARD_CHANGED,),
        is_borne=True,
        settings=LONGER,
    ),
    Fault(
        "entropy",
        "a bonus of the wrong sign, rate x 30",
        partial(entropy_penalised, weight=1.0, rate=30.0),
        ("entropy-lost", "entropy-collapse"),
        (EndCause.ENTROPY_COLLAPSE,),
        settings=UNSURE,
        longer=8,
    ),
    *HEALING,
)
