"""Which metrics a page draws, in which section, and how each drawing is to be read."""

from dataclasses import dataclass

from mismatch_probe.report.figures.over_steps import AxisScale


@dataclass(frozen=True)
class Plot:
    """One drawing. The first metric is drawn strong, a second one thin."""

    anchor: str
    title: str
    metrics: tuple[str, ...]
    y_label: str
    scale: AxisScale
    reading: str


@dataclass(frozen=True)
class PlotSection:
    """Drawings under one heading; `caption` follows "How to read it"."""

    anchor: str
    title: str
    lede: str
    caption: str
    plots: tuple[Plot, ...]


OVERVIEW = (
    Plot(
        "reward",
        "Reward",
        ("reward/mean",),
        "mean reward",
        "linear",
        "Mean over the step's responses: what the run is there to raise.",
    ),
    Plot(
        "kl",
        "Mismatch: KL per token",
        ("mismatch/kl_k3",),
        "KL (k3), nats per token",
        "log",
        "pi against mu on the step's own tokens, before anything is clamped. Lower is closer.",
    ),
)

_MISMATCH = PlotSection(
    "mismatch",
    "Mismatch over the run",
    "pi is the policy that trains, mu the one that sampled, with the same weights. Every run of the paper that "
    "collapsed showed a growing mismatch first (arXiv 2510.26788).",
    "flat is good. A curve that climbs while the weights are synced is arithmetic that the policy's sharpening "
    "amplifies; a jump between two steps is something else.",
    (
        Plot(
            "extremes",
            "Extremes of pi − mu",
            ("mismatch/prob_diff_max", "mismatch/prob_diff_min"),
            "difference of probability",
            "linear",
            "The largest difference of a token's probability, and thin the smallest. They go to +1 and −1 before a "
            "collapse.",
        ),
        Plot(
            "deviation",
            "Deviation |d|",
            ("mismatch/abs_logprob_diff", "mismatch/abs_logprob_diff_max"),
            "|d|, nats",
            "log",
            "Mean over tokens, and thin the worst token of the step.",
        ),
        Plot(
            "ess",
            "Effective sample size",
            ("mismatch/ess_seq", "mismatch/ess_token"),
            "share that counts",
            "share",
            "What importance weighting leaves of whole responses, and thin of tokens; 1 is no loss.",
        ),
        Plot(
            "probe",
            "Error on the probe",
            ("sync/probe_logit_error",),
            "error of a logit, nats",
            "log",
            "Median on the same tokens through both sides after every sync, so sampling does not move it. A jump means "
            "that the engine holds other weights than it was sent.",
        ),
        Plot(
            "entropy-ratio",
            "KL over entropy",
            ("mismatch/kl_entropy_ratio",),
            "KL (k3) / entropy",
            "log",
            "How much of the policy's remaining randomness the mismatch is.",
        ),
        Plot(
            "temperature",
            "Temperature fit",
            ("mismatch/temperature_fit",),
            "T of pi / T of mu",
            "linear",
            "Fitted to d: 1 where both sides use one temperature.",
        ),
    ),
)

_OPTIMISATION = PlotSection(
    "optimisation",
    "Optimisation",
    "What the updates did to the policy. An update whose gradients are not finite is skipped, and halves the loss "
    "scale of FP16.",
    "amber ticks at the foot are skipped updates. A few after each growth of the loss scale are how it finds its "
    "level; one after another are not.",
    (
        Plot(
            "entropy",
            "Entropy of the policy",
            ("policy/entropy",),
            "nats per token",
            "linear",
            "It falls as the policy grows sure; a fall to 0 early ends exploration.",
        ),
        Plot(
            "gradient",
            "Gradient norm",
            ("optim/grad_norm",),
            "norm before clipping",
            "log",
            "Unscaled, over all parameters.",
        ),
        Plot(
            "loss-scale",
            "Loss scale",
            ("optim/loss_scale",),
            "scale",
            "log",
            "What the loss is multiplied by so that small gradients survive FP16.",
        ),
        Plot(
            "shift",
            "Shift of the policy",
            ("update/policy_shift_k3",),
            "KL (k3), nats per token",
            "log",
            "Between pi before and after the last update, on the probe.",
        ),
        Plot(
            "learning-rate",
            "Learning rate",
            ("optim/learning_rate",),
            "rate",
            "linear",
            "The schedule times what guards left of it.",
        ),
        Plot("loss", "Loss", ("optim/loss",), "loss", "linear", "Mean over the step's updates, before any scaling."),
    ),
)

_RESPONSES = PlotSection(
    "responses",
    "Responses",
    "What was sampled to learn from.",
    "growing length with a growing share cut at the limit means that the limit decides the reward.",
    (
        Plot(
            "length",
            "Response length",
            ("response/length_mean", "response/length_max"),
            "tokens",
            "linear",
            "Mean, and thin the longest of the step.",
        ),
        Plot(
            "truncated",
            "Cut at the limit",
            ("response/truncated_share",),
            "share of responses",
            "share",
            "Responses that ended because they were as long as allowed.",
        ),
        Plot(
            "flat",
            "Prompts without a signal",
            ("reward/flat_groups_share",),
            "share of prompts",
            "share",
            "All responses earned the same, so group-relative advantages are 0.",
        ),
    ),
)

_CORRECTION = PlotSection(
    "correction",
    "What the objective cut away",
    "Importance weights that the correction bounds, responses it rejects, and ratios that the objective clips.",
    "where shares are near 0, and the ESS near 1, the rule is idle; the more it cuts, the less the run learns from.",
    (
        Plot(
            "weights-clipped",
            "Weights clipped",
            ("correction/clipped_share",),
            "share that is clipped",
            "share",
            "By the correction's bound; of tokens, or of responses where it weighs these whole.",
        ),
        Plot(
            "weights-rejected",
            "Rejected",
            ("correction/rejected_share",),
            "share that is rejected",
            "share",
            "Out of the loss and out of its denominator; of tokens, or of responses where it weighs these whole.",
        ),
        Plot(
            "left-out",
            "Left out beforehand",
            ("correction/excluded_share",),
            "share of responses",
            "share",
            "Truncated ones where these are masked, and those beyond the bound that a guard has set.",
        ),
        Plot(
            "ess-corrected",
            "ESS after the correction",
            ("correction/ess",),
            "share that counts",
            "share",
            "Of what the correction keeps.",
        ),
        Plot(
            "ratio-clipped",
            "Ratios clipped",
            ("optim/clipped_share",),
            "share of tokens",
            "share",
            "Kept tokens whose gradient the clip of pi over old pi cut to 0.",
        ),
    ),
)

_TIME = PlotSection(
    "time",
    "Time",
    "Wall-clock seconds by phase: weights sent (sync) and probed, responses sampled and rewarded (sample), scored "
    "under pi (score), gradients (learn), metrics (measure), guards, the optimizer (update).",
    "the longest bar is where a faster run has to be looked for.",
    (
        Plot(
            "throughput",
            "Response tokens a second",
            ("time/tokens_per_second", "time/sampled_tokens_per_second"),
            "tokens a second",
            "linear",
            "Of the whole step, and thin of sampling alone.",
        ),
        Plot("seconds", "Seconds of a step", ("time/step_seconds",), "seconds", "linear", "From sync to update."),
    ),
)

SECTIONS = (_MISMATCH, _OPTIMISATION, _RESPONSES, _CORRECTION, _TIME)
TIME = _TIME.anchor

MEANINGS = {
    name: f"{plot.title}: {plot.reading}"
    for plot in (*OVERVIEW, *(plot for section in SECTIONS for plot in section.plots))
    for name in plot.metrics
}
"""What a drawn metric is, for the table of every metric."""
