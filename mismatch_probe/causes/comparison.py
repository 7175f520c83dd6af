"""Causes of a mismatch: what a verdict of a comparison, or of `explain` on a log, can name."""

from dataclasses import dataclass
from typing import Final

from mismatch_probe.causes import Catalogued, CauseEntry, CauseRank, SeenIn, Sign, VerdictKind, Words

ARRAYS, COUNTS, PASSES, SETTINGS, SUMS = SeenIn.ARRAYS, SeenIn.COUNTS, SeenIn.PASSES, SeenIn.SETTINGS, SeenIn.SUMS

USABLE_ONLY: Final = "Numbers below describe the usable responses only; do not act on them before this is fixed."
_COMPARE_POSITIONS: Final = (
    "Compare RoPE base, RoPE scaling, sliding window and position ids of both sides; left-padded batches need a mask "
    "and position ids that start at each row's first token."
)
_SHIFT: Final = (
    "The log-prob of token t comes from the logits at position t - 1: check the shift between logits and labels on the "
    "training side, and how responses are cut out of prompt and response."
)


@dataclass(frozen=True)
class Mismatch(CauseEntry):
    """A cause that a verdict names."""

    kind: VerdictKind = "bug"
    seen_in: SeenIn = ARRAYS
    rank: CauseRank = CauseRank.SHAPE
    """What the data can say for it, which ranks it; a setting that makes it has a rank of its own."""
    in_a_log: str = ""
    """What fixes it where `explain` found it in a log, whose sides are somebody else's."""
    in_short: str = ""
    """What fixes it, in a few words."""
    is_in_the_model: bool = False
    """Whether it enters at a module, which `localize` can find; other bugs are in ids, prompts, labels and sampling."""


class Code(Catalogued):
    """A member is its code in JSON; `kind` says how it is to be taken, `entry` holds the rest."""

    entry: Mismatch

    @property
    def kind(self) -> VerdictKind:
        return self.entry.kind

    NO_DATA = Mismatch(
        "Nothing was measured: not one response has a token to compare.",
        "Check that the model generates text for these prompts (--max-new-tokens, the chat template).",
        name="no_data",
        kind="broken",
        seen_in=COUNTS,
    )
    DTYPE_NOT_APPLIED = Mismatch(
        "Not a measurement of {wanted}: {side} ran in {applied}.",
        "Find what overrides the dtype of {side} (a quantisation setting or the checkpoint's own config).",
        name="dtype_not_applied",
        kind="broken",
        seen_in=COUNTS | SETTINGS,
    )
    IDS_DIFFER = Mismatch(
        "The data is broken: {count} responses were scored on other token ids than were sampled.",
        "Score exactly the sampled ids of prompt and response.",
        name="ids_differ",
        kind="broken",
        seen_in=COUNTS,
    )
    MISSING_LOGPROBS = Mismatch(
        "The data is broken: {count} log-probs are missing on {side} (NaN, vLLM's floor of -9999, or -100 or lower for "
        "a token that was sampled).",
        USABLE_ONLY,
        name="missing_logprobs",
        kind="broken",
        seen_in=COUNTS | PASSES | SUMS,
        in_a_log="Have log-probs recorded for every sampled token, and never read a missing one as 0.",
    )
    NONFINITE = Mismatch(
        "The data is broken: {count} log-probs are infinite on {side}.",
        USABLE_ONLY,
        name="nonfinite",
        kind="broken",
        seen_in=COUNTS,
    )
    POSITIVE_LOGPROBS = Mismatch(
        "The data is broken: {count} log-probs are above 0 on {side}, and no probability is above 1.",
        USABLE_ONLY,
        name="positive_logprobs",
        kind="broken",
        seen_in=COUNTS,
    )
    COPIED_LEG = Mismatch(
        "{legs} hold the same log-probs bit for bit {where}: one leg may be a copy of the other.",
        "Run the comparison again with this version: legs that say whose they are may be equal.",
        name="copied_leg",
        kind="broken",
    )
    VOID_CHECKS = Mismatch(
        "The data is broken: {count} responses have prefill or reference log-probs that are missing, not finite or "
        "above 0.",
        USABLE_ONLY,
        name="void_checks",
        kind="broken",
        seen_in=COUNTS,
    )
    RETOKENISED = Mismatch(
        "Responses were tokenised again: {count} of {total} have other token ids or lengths on one side.",
        "Pass the sampled token ids to the training side; text encoded again need not give the same tokens.",
        name="retokenised",
        seen_in=COUNTS,
        in_short="Pass token ids on",
    )
    MISPAIRED = Mismatch(
        "Responses are mispaired: {count} of {total} carry the scores of another response.",
        "Join both sides by a response id, not by order; look for a sort, a shuffle or a drop between them.",
        name="mispaired",
        seen_in=COUNTS | ARRAYS | PASSES | SUMS,
        in_short="Join by a response id",
    )
    LABEL_OFFSET = Mismatch(
        "The labels of one side are off by {shift:+d}: its scores belong to the neighbouring token.",
        _SHIFT,
        name="label_offset",
        seen_in=ARRAYS | PASSES | SUMS,
        in_short="Shift the labels",
        in_a_log="Read the log-prob of a token from the logits before it.",
        variants={
            "other_tokens": Words(
                "The training path scores other tokens than the engine sampled.",
                (_SHIFT, "See with which ids the training side gathers log-probs, and on which side it pads."),
            )
        },
    )
    OTHER_BASE = Mismatch(
        "{column} are logarithms to {base}, not natural ones.",
        "Multiply them by ln {number} = {nats:.4f}, or write natural log-probs (log, not log{number}){or_entropies}.",
        name="other_base",
        seen_in=ARRAYS | PASSES | SUMS,
        in_short="Write natural logs",
        in_a_log="Write natural logarithms, or multiply the column by ln 2 or ln 10.",
    )
    TRUNCATED_SUPPORT = Mismatch(
        "{side} samples from part of the vocabulary (top-p, top-k) and renormalises; the other side does not.",
        "Sample with top_p=1 and top_k off, or apply the same truncation to the training path's logits; check which "
        "defaults the engine takes from generation_config.json.",
        name="truncated_support",
        seen_in=ARRAYS | SETTINGS | PASSES,
        in_short="Cut both sides alike",
        in_a_log="Sample without top-p, top-k and min-p, or give the trainer the tokens that were kept.",
    )
    TEMPERATURE = Mismatch(
        "The two sides use different temperatures: the training path's is {ratio:.4g} times the engine's.",
        "See at which temperature the engine really samples (the request, its generation_config), divide the training "
        "path's logits by that one, and take processed log-probs from the engine (vLLM: "
        "logprobs_mode=processed_logprobs).",
        name="temperature",
        seen_in=ARRAYS | SETTINGS | PASSES | SUMS,
        in_short="Use one temperature",
        in_a_log="Set that side to the temperature that the log declares, or declare the one that it uses; an engine "
        "takes one from the generation_config, too.",
        variants={
            "sampler": Words(
                "The engine does not sample from the distribution whose log-probs both sides give, but from a "
                "{flatter} one.",
                "Take processed log-probs from the engine (vLLM: logprobs_mode=processed_logprobs) and divide the "
                "training path's logits by the sampling temperature; or see that the entropy is that of the training "
                "path's distribution, in nats.",
            )
        },
    )
    RAW_LOGPROBS = Mismatch(
        "{side} departs from its declared settings: {what}.",
        name="raw_logprobs",
        seen_in=PASSES,
        in_short="Use processed log-probs",
        in_a_log="Have the engine return processed log-probs (vLLM: logprobs_mode = processed_logprobs).",
    )
    NOT_REPEATABLE = Mismatch(
        "{side} does not agree with itself: {what}.",
        "Put the model in evaluation mode (dropout off); look for padding that is attended to, sequences packed "
        "without boundaries, and nondeterministic kernels.",
        name="not_repeatable",
        seen_in=ARRAYS | SETTINGS | PASSES,
        in_short="Find what varies",
        in_a_log="Put the model into evaluation mode for log-probs, and set its dropout to 0.",
        variants={
            "engine": Words(
                "{side} does not agree with itself: {what}.",
                "Switch off prefix caching, chunked prefill, speculative decoding and cascade attention one at a time, "
                "and reset the prefix cache after every weight update.",
            )
        },
    )
    ONE_SIDED_DTYPE = Mismatch(
        "One side computes in another format than the run says: {what}.",
        "Read back which format really multiplies on that side: autocast, a cast at load, quantisation.",
        name="one_sided_dtype",
        seen_in=ARRAYS | SETTINGS | PASSES,
        in_short="Use one format",
        is_in_the_model=True,
        in_a_log="Say in which format each side computes, or set the one that departs to what was meant.",
        variants={
            "grid": Words(
                "One side computes in another format than the run says: {what}.",
                "Compute log-softmax in FP32 on both sides, and keep log-probs in FP32 on the way.",
            )
        },
    )
    PROMPT_PREFIX = Mismatch(
        "The two sides read different text before the response: {what}.",
        "Compare the token ids both sides read, from the first: BOS once, the same template and system prompt, and "
        "nothing stripped between prompt and response.",
        name="prompt_prefix",
        seen_in=COUNTS | ARRAYS | SETTINGS | PASSES,
        rank=CauseRank.PLACE,
        in_short="Give both one prompt",
        in_a_log="Give both sides the same token ids instead of a text that each encodes or templates again.",
        variants={
            "ids": Words(
                "The two sides read different text before the response: {what}.",
                "Encode prompts once and pass ids on; the tokenizer's BOS and the template's must not both be added.",
            )
        },
    )
    POSITIONS = Mismatch(
        "The two sides treat positions differently: {what}.",
        _COMPARE_POSITIONS,
        name="positions",
        seen_in=ARRAYS | SETTINGS | PASSES,
        rank=CauseRank.PLACE,
        in_short="Use one config",
        is_in_the_model=True,
        in_a_log="Compare config.json, position ids and padding of both sides.",
    )
    PERIOD = Mismatch(
        "{side} errs once in every {block} places of the context, at {phase} from the start of each block.",
        "Look at what works in blocks of {block} tokens there: chunked prefill (max_num_batched_tokens), the page of "
        "the KV cache, a tile of the attention or of FP8 scales. Change the size: the period moves with its cause.",
        name="period",
        seen_in=ARRAYS | PASSES,
        in_short="Change the block size",
        is_in_the_model=True,
        in_a_log="Look at what works in blocks of so many tokens on that side (a chunk of the prefill, a page of the "
        "KV cache, a tile of a kernel), and change its size.",
    )
    ONSET = Mismatch(
        "{side} departs from place {place} of the context on{what}.",
        "Look at what ends there: a sliding window, the top-k of a sparse index, a rope or cache limit; or, before the "
        "longest context, draft tokens that run beyond max_model_len. Change that limit: the place moves with its "
        "cause.",
        name="onset",
        seen_in=ARRAYS | PASSES,
        rank=CauseRank.PLACE,
        in_short="Change the limit there",
        is_in_the_model=True,
        in_a_log="Look at what ends at that place on that side (a window, a sparse index, a limit of the cache), and "
        "change it.",
    )
    PACKING = Mismatch(
        "{side} departs from its declared settings: {what}.",
        name="packing",
        seen_in=PASSES,
        in_short="Reset at each response",
        in_a_log="Pass position ids or sequence lengths that reset attention at every packed response.",
    )
    ROUTING = Mismatch(
        "Expert routing: {what}.",
        "Keep the router in FP32 on both sides, or replay the engine's expert choices while training.",
        name="routing",
        kind="precision",
        seen_in=ARRAYS | SETTINGS,
        in_short="Use one router",
    )
    OTHER_EXPERTS = Mismatch(
        "The two sides choose other experts in FP32, from layer {layer} on: for {share} of its tokens, with weights "
        "{distance} apart.",
        "Compare the router of layer {layer} on both sides: its weights, its bias or score correction (a buffer, which "
        "a weight sync can miss), the format it computes in, and how its scores are normalised.",
        name="other_experts",
        rank=CauseRank.EXPERTS,
        in_short="Use one router",
    )
    CONFIGURATION = Mismatch(
        "The two sides are set differently: {what}.", name="configuration", seen_in=SETTINGS, in_short="Use one config"
    )
    ADAPTER = Mismatch(
        "The two sides are set differently: {what}.", name="adapter", seen_in=SETTINGS, in_short="Use one adapter"
    )
    STALE_WEIGHTS = Mismatch(
        "The two sides hold different weights: they disagree everywhere, by {size} nats a token, where formats cannot.",
        "Compare the weights of both sides: push them again, merge adapters on both, reload tied embeddings, and reset "
        "the prefix cache after each sync.",
        name="stale_weights",
        seen_in=ARRAYS | SETTINGS | PASSES,
        rank=CauseRank.ELIMINATION,
        in_short="Send the weights",
        is_in_the_model=True,
        in_a_log="Look at when weights are handed over, and at caches that are kept across it.",
    )
    MIXED_WEIGHTS = Mismatch(
        "{side} departs from its declared settings: {what}.",
        name="mixed_weights",
        seen_in=PASSES,
        in_short="Record each part's version",
        in_a_log="Record the version of the weights with each token, or at dispatch at the least; drop the key-value "
        "cache with each update, or take the mismatch behind it into account.",
    )
    BEYOND_FORMAT = Mismatch(
        "This is a bug, not precision: {sides} by more than {formats} can.",
        "Look at that side's temperature, template, positions and weights, and at the order of its rows.",
        name="beyond_format",
        variants={
            "rounding": Words(
                "This is a bug, not precision: {sides} by more than {formats} can.", "Look for {look_for}."
            ),
            "steps": Words("This is a bug, not precision: at {steps} the two sides differ by more than {formats} can."),
        },
    )
    OTHER_CHECKPOINT = Mismatch(
        "The checkpoint is not the one that made this log{unless}: {sides} from what it computes, by more than "
        "rounding can.",
        "Give the checkpoint, and the adapter, that the log's step was sampled and trained with.",
        name="other_checkpoint",
        kind="undecided",
        seen_in=ARRAYS | PASSES,
    )
    UNEXPLAINED = Mismatch(
        "{what}", name="unexplained", kind="undecided", seen_in=ARRAYS | PASSES | SUMS, is_in_the_model=True
    )
    PRECISION = Mismatch("Precision: the sides differ by KL {kl} a token{proof}.", name="precision", kind="precision")
    ILL_CONDITIONED = Mismatch(
        "Ill-conditioned model: FP32 itself is {fp32} nats a token from FP64 on this checkpoint, so that no format "
        "computes it to better than that; {sides}.",
        "Look for what makes the model so sensitive: an adapter with large factors, a step that diverged, a layer "
        "whose output dwarfs its input. No dtype and no setting of the engine removes it.",
        name="ill_conditioned",
        kind="precision",
        in_short="Find what amplifies rounding",
        variants={
            "open": Words(
                "FP32 itself is {fp32} nats a token from FP64 on this checkpoint; {sides}, and these tokens do not "
                "tell that from rounding.",
                "Compare more prompts (--num-prompts): they narrow these intervals.",
            ),
            "unmeasured": Words(
                "FP32 against FP32 differs by {size} nats a token, and no known cause fits; whether FP32 computes this "
                "checkpoint at all is not known, since it could not be computed in FP64: {why}.",
                "Compare where FP64 can be had (a CPU, more memory, weights that are not quantised): a model that FP32 "
                "cannot compute looks like this, and so does a bug.",
            ),
        },
    )
    SETTINGS = Mismatch(
        "Settings: {what}; {settings} is all that differs from {baseline}.", name="settings", kind="precision"
    )
    CLEAN = Mismatch("Clean: the two sides agree to {size} nats a token.", name="clean", kind="clean")
    AS_DECLARED = Mismatch(
        "As declared: {side} is what its checkpoint and settings give.",
        name="as_declared",
        kind="clean",
        seen_in=PASSES,
    )


def words_in_short(code: str) -> str:
    """What fixes a cause, in a few words; empty where the catalogue has none, as for a code of another version."""
    return Code.by_name(code).entry.in_short if code in tuple(Code) else ""


ARRAYS_IN_ORDER: Final[tuple[Sign, ...]] = (
    Code.OTHER_BASE,
    Code.LABEL_OFFSET,
    Code.MISPAIRED,
    Code.PERIOD,
    Code.ONSET,
    Code.TRUNCATED_SUPPORT,
    (Code.ONE_SIDED_DTYPE, "grid"),
    Code.TEMPERATURE,
    Code.NOT_REPEATABLE,
    (Code.TEMPERATURE, "sampler"),
    Code.POSITIONS,
    Code.PROMPT_PREFIX,
    Code.STALE_WEIGHTS,
)
"""Signatures in the order in which one hides those after it: shapes that rounding cannot take, then causes that
the place of the deviation in the context shows, once it is settled that there is a bug.
"""
