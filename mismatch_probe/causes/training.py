"""What can end a training run, as the metrics of its last steps show it."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.causes import Catalogued, CauseEntry, SeenIn, Sign, Words
from mismatch_probe.causes.comparison import Code

COMPARE_WEIGHTS: Final = (
    "Compare the weights of both sides layer by layer: tied embeddings, merged adapters, renamed parameters."
)
_LABELS: Final = "Look for labels shifted by one, padding on the wrong side, and responses paired with other prompts."
_SYNC: Final = "Check that each update is followed by a weight sync, and that the engine's caches are reset after it."


@dataclass(frozen=True)
class Ending(CauseEntry):
    """A cause that `diagnose` names. Causes of a comparison that sums show too have its wire name."""

    seen_in: SeenIn = SeenIn.SUMS


class EndCause(Catalogued):
    """A member is its code in JSON."""

    entry: Ending

    NO_TOKENS = Ending(
        "No token counts: in the last {steps} the mask left none of any response, so nothing was measured and there is "
        "nothing to learn from.",
        "See what sets the mask of the loss to 0: an inverted mask, a chat template that no longer marks the response, "
        "or a rule that masks all truncated responses.",
        name="no_tokens",
    )
    COPIED_SIDE = Ending(
        "One side's log-probs are copied from the other's: they are equal bit for bit at {share} of the tokens below "
        "-{certain:g}, so no mismatch was measured.",
        "Give log-probs that each side computed; a bypass mode of the trainer copies the engine's. Where kernels are "
        "the same on both sides, say computed_apart=True.",
        name="copied_side",
        variants={
            "rows": Words(
                "In {share} of the responses one side's log-probs are copied from the other's, and hide what the "
                "others show: the mismatch was measured over all of them.",
                "Give log-probs that each side computed, or leave these responses out of the mask.",
            )
        },
    )
    REWARD_SCALE = Ending(
        "The rewards have another scale: one is {now} in size, the largest of the steps before {before}.",
        "Look at what the reward function gives for the responses of this step: another unit, a missing bound.",
        name="reward_scale",
    )
    FP16_DEAD = Ending(
        "FP16 training is dead: {seen}.",
        (
            "Train with --train-dtype bf16 or fp32.",
            "Before switching back, see with `mismatch-probe headroom` which layer's outputs pass 65,504.",
        ),
        name="fp16_dead",
    )
    MISSING_LOGPROBS = Ending(
        "The engine gave no log-prob that can be used for {tokens} of the last step.",
        "Ask the engine for the log-prob of every token it samples, and see whether its logits are finite.",
        name=Code.MISSING_LOGPROBS,
        variants={
            "above_zero": Words(
                "{tokens} of the last step have a log-prob above 0, or an entropy below, which no distribution gives.",
                "Give natural log-probs, not logits or negated ones, and the entropy in nats.",
            ),
            "zeros": Words(
                "{side} gave 0 as the log-prob of {tokens} of the last step that the other side is not sure of, so "
                "that 0 stands for no number there.",
                "Record the log-prob of every sampled token: greedy sampling and padding give zeros, too. Give NaN "
                "where there is none, or leave the token out of the mask.",
            ),
        },
    )
    REWARD_LATE = Ending(
        "The reward function is too slow: for {responses} of the last step it took longer than task.reward_seconds.",
        "Time it on the responses of this step; make it faster, raise the limit or task.reward_workers.",
        name="reward_late",
    )
    REWARD_NAN = Ending(
        "The rewards of the last step cannot be learned from: {seen} are NaN or infinite.",
        "Call the reward function on the responses of this step, and return 0 where it cannot judge one.",
        name="reward_nan",
    )
    NONFINITE_GRADIENT = Ending(
        "There is no update to apply: {seen}.",
        "Roll back, lower the learning rate or max_grad_norm, and look for log-probs of minus infinity.",
        name="nonfinite_gradient",
    )
    TRUNCATED = Ending(
        "Nothing is learnt: in each of the last {steps} steps at least {percent} % of the responses were cut at the "
        "length limit, no two of a prompt earned another reward, and the gradient was 0.",
        (
            "Raise --max-new-tokens, or take an easier --task.",
            "See whether the model ends its responses at all: the chat template, the end-of-sequence token.",
        ),
        name="truncated",
    )
    NO_END = Ending(
        "Responses lost their end: {percent} % of the last step's were not cut and do not end with a token that ends "
        "them, so that ending is not learnt.",
        "Keep the end-of-sequence token in the response's ids, its log-probs and the mask of the loss.",
        name="no_end",
    )
    REWARD_UNREPEATED = Ending(
        "Rewards do not repeat, or do not belong to their responses: asked again, the reward function gives {count} of "
        "a few responses of the last step another reward.",
        "See whether rewards are paired with other responses, or whether the function gives one response two.",
        name="reward_unrepeated",
        variants={
            "mispaired": Words(
                "Rewards do not belong to their responses: {times} times in the last steps the reward function, asked "
                "twice again, gave one reward both times and not the one that was learnt from.",
                "See whether rewards are paired with other responses, or changed on their way into the loss.",
            )
        },
    )
    BATCH_REPEATED = Ending(
        "The same responses come again: {when} the mean log-prob of mu is {mean}, to the last digit, and responses are "
        "as long.",
        "See that each step samples anew. Where one batch is learnt from several times, judge it once.",
        name="batch_repeated",
    )
    OTHER_BASE = Ending(
        "{whose} log-probs are logarithms to {base}, not natural ones: {is_what}, at sure and at unsure tokens alike.",
        "Multiply them by ln {number} = {nats:.4f}, or write natural log-probs (log, not log{number}).",
        name=Code.OTHER_BASE,
    )
    MISPAIRED = Ending(
        "Responses are mispaired: {share} of those whose sides are far apart carry the log-probs of another response "
        "of the batch.",
        Code.MISPAIRED.entry.fix,
        name=Code.MISPAIRED,
    )
    LABEL_OFFSET = Ending(
        "The log-probs of one side are shifted by one token: moved back, they are apart by {rest} times as much.",
        _LABELS,
        name=Code.LABEL_OFFSET,
        variants={
            "other_tokens": Words(
                "The trainer scores other tokens than the engine sampled: the two sides' probabilities have a "
                "correlation of {pearson}, and pi finds them {excess} nats less likely than its entropy says.",
                _LABELS,
            )
        },
    )
    STALE_SYNC = Ending(
        "The engine samples from old weights: at step {step} its log-probs were bit for bit those from before the "
        "sync, although the weights sent differ.",
        _SYNC,
        name="stale_sync",
        variants={
            "resync": Words(
                "The engine had lost the weights: the mismatch fell from {before} to {after} nats when they were sent "
                "again after step {step}.",
                _SYNC,
            )
        },
    )
    PARTIAL_SYNC = Ending(
        "The engine took only a part of the weights: right after a sync {seen}.",
        (
            "The log of the run (logs/train.log) names them: see what is left out or changed on the way.",
            COMPARE_WEIGHTS,
        ),
        name="partial_sync",
    )
    TEMPERATURE = Ending(
        "The two sides use different temperatures: mu's log-probs follow pi's {slope} where 1 is due.",
        "Divide the training path's logits by the sampling temperature, and take processed log-probs of the engine.",
        name=Code.TEMPERATURE,
        variants={
            "sampler": Words(
                "The engine does not sample from the distribution whose log-probs it reports: pi's log-probs of its "
                "tokens are {nats} nats a token {above} what its entropy says.",
                "Look for a temperature, top-p, top-k or penalty that shapes the samples and not the log-probs.",
            ),
            "support": Words(
                "The engine gives nothing to {percent} % of what pi would sample: the mean of pi/mu over its tokens is "
                "{mean} where 1 is due.",
                "Look for top-p, top-k, min-p or forbidden tokens on the engine's side, or give pi the same.",
            ),
        },
    )
    TOKENS_REPLACED = Ending(
        "The trainer scores other tokens than the engine sampled: in {share} of the responses both sides agree up to a "
        "token that pi finds 20 times less likely than mu; before it logits differ by {before} times as much as on "
        "average.",
        "Hand the sampled token ids to the trainer as they are: no decoding, encoding or replacing between.",
        name="tokens_replaced",
    )
    LEARNING_RATE = Ending(
        "The learning rate is too high: {seen}.",
        "Roll back to the last good checkpoint and lower the learning rate ten times.",
        name="learning_rate",
    )
    COMPUTATION = Ending(
        "Both sides hold the same weights and compute other numbers: right after a sync their logits of the probe "
        "tokens are {nats} nats apart (KL {kl}), and no digest of a weight differs.",
        (
            "Compare what is no weight: the token that each log-prob is of, RoPE base and scaling, position ids, "
            "attention masks, soft caps, formats.",
            "`mismatch-probe localize` says which layer departs first.",
        ),
        name="computation",
    )
    ENGINE_WEIGHTS = Ending(
        "The engine does not hold the weights it was sent, or computes otherwise: right after a sync its logits of the "
        "probe tokens are {now} nats from pi's, {before} before.",
        (COMPARE_WEIGHTS, "Where they are equal, compare positions (RoPE), attention masks and number formats."),
        name="engine_weights",
    )
    OTHER_SCORES = Ending(
        "Both sides agree on the probe (KL {probe}) and not on the responses (KL {kl}, logits {nats} nats apart): the "
        "log-probs of these are of other weights or of other tokens.",
        "See that both sides' log-probs of a step come from the weights of that step, and from the same token ids.",
        name="other_scores",
    )
    GRADIENT_SCALE = Ending(
        "The gradient has another scale: its norm is {now}, that of the steps before at most {before}, while neither "
        "rewards nor log-probs jumped.",
        "See that gradients are divided by the loss scale, the number of micro-batches, and that of ranks.",
        name="gradient_scale",
    )
    REWARD_CHANGED = Ending(
        "The reward went {levels} {when}.",
        "See whether the reward function, its data or the problems changed at that step, as in a curriculum whose "
        "problems get harder; where they were meant to, nothing is to be done.",
        name="reward_changed",
    )
    ENTROPY_COLLAPSE = Ending(
        "The policy gets sure without earning more by it: {seen}.",
        "See whether advantages are centred within a prompt and whether the loss rewards certainty; then lower the "
        "learning rate, widen the upper clip, or add an entropy bonus.",
        name="entropy_collapse",
    )
    FLAT = Ending(
        "Nothing is learnt: in each of the last {steps} steps {what}.",
        "Take problems that are solved now and then, and see whether the reward function judges anything.",
        name="flat",
        variants={
            "constant": Words(
                "Nothing is learnt: the rewards are constant. They went {levels} {when}, and all responses earn the "
                "same since.",
                "See whether the reward function judges anything since that step, and whether it can be reached.",
            )
        },
    )
    PRECISION_DRIFT = Ending(
        "The mismatch of the two sides grows with equal weights: k3 went from {start} to {end} nats in {steps} steps, "
        "by errors of a logit of {nats} nats that are as often above as below.",
        "Use fp16 or fp32 on both sides, or --infer-dtype fp32, or an objective that rejects whole sequences.",
        name="precision_drift",
    )
    NARROW_BAND = Ending(
        "The correction loses hold of the mismatch: {seen}.",
        "Take bounds that follow the mismatch, bound whole sequences, or bring the two sides closer.",
        name="narrow_band",
    )
    HARMFUL_UPDATES = Ending(
        "The policy gets worse step by step: {seen}. The numbers do not tell a gradient that points the wrong way from "
        "a rate that is too high or problems that got harder.",
        (
            "Look at the sign of rewards, advantages, loss and gradient, and whether advantages are of the right "
            "responses; then lower the learning rate.",
            "Where the problems are meant to get harder, allow it (docs/guards.md, a harder curriculum).",
        ),
        name="harmful_updates",
    )
    UNEXPLAINED = Ending(
        "No known cause fits. Guards saw: {seen}.{since}{ruled_out}",
        "Read the metrics of the last steps, and run compare on the last checkpoint.",
        name=Code.UNEXPLAINED,
    )


SUMS_IN_ORDER: Final[tuple[Sign, ...]] = (
    EndCause.NO_TOKENS,
    EndCause.COPIED_SIDE,
    (EndCause.COPIED_SIDE, "rows"),
    EndCause.REWARD_SCALE,
    EndCause.FP16_DEAD,
    EndCause.MISSING_LOGPROBS,
    EndCause.REWARD_LATE,
    EndCause.REWARD_NAN,
    EndCause.NONFINITE_GRADIENT,
    EndCause.TRUNCATED,
    EndCause.NO_END,
    EndCause.REWARD_UNREPEATED,
    EndCause.BATCH_REPEATED,
    EndCause.OTHER_BASE,
    EndCause.MISPAIRED,
    EndCause.LABEL_OFFSET,
    EndCause.STALE_SYNC,
    EndCause.PARTIAL_SYNC,
    EndCause.TEMPERATURE,
    EndCause.TOKENS_REPLACED,
    EndCause.LEARNING_RATE,
    EndCause.COMPUTATION,
    EndCause.ENGINE_WEIGHTS,
    (EndCause.TEMPERATURE, "sampler"),
    (EndCause.TEMPERATURE, "support"),
    (EndCause.LEARNING_RATE, "several"),
    EndCause.OTHER_SCORES,
    EndCause.GRADIENT_SCALE,
    EndCause.REWARD_CHANGED,
    EndCause.ENTROPY_COLLAPSE,
    EndCause.FLAT,
    EndCause.PRECISION_DRIFT,
    EndCause.NARROW_BAND,
    EndCause.HARMFUL_UPDATES,
)
"""Signatures in the order in which they are tried: earlier causes bring on the signs of later ones."""
