"""Every cause a verdict can name: its code in JSON, how it is to be taken, and its sentence."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from mismatch_probe.records.summary import Cause, Kind

_OF_ONE: Final = (
    ("log-probs are", "log-prob is"),
    ("responses were", "response was"),
    ("responses have", "response has"),
)
"""What a template says of many, and of one."""


class Code(StrEnum):
    """A member is its code; `kind` and `template` say how it is taken and what it says."""

    kind: Kind
    template: str

    def __new__(cls, code: str, kind: Kind, template: str) -> "Code":
        member = str.__new__(cls, code)
        member._value_ = code
        member.kind = kind
        member.template = template
        return member

    NO_DATA = "no_data", "broken", "Nothing was measured: not one response has a token to compare."
    DTYPE_NOT_APPLIED = "dtype_not_applied", "broken", "Not a measurement of {asked}: {side} ran in {applied}."
    IDS_DIFFER = (
        "ids_differ",
        "broken",
        "The data is broken: {count} responses were scored on other token ids than were sampled.",
    )
    MISSING_LOGPROBS = (
        "missing_logprobs",
        "broken",
        "The data is broken: {count} log-probs are missing on {side} (NaN, vLLM's floor of -9999, or -100 or lower for "
        "a token that was sampled).",
    )
    NONFINITE = "nonfinite", "broken", "The data is broken: {count} log-probs are infinite on {side}."
    POSITIVE_LOGPROBS = (
        "positive_logprobs",
        "broken",
        "The data is broken: {count} log-probs are above 0 on {side}, and no probability is above 1.",
    )
    COPIED_LEG = (
        "copied_leg",
        "broken",
        "{legs} hold the same log-probs bit for bit {where}: one leg may be a copy of the other.",
    )
    VOID_CHECKS = (
        "void_checks",
        "broken",
        "The data is broken: {count} responses have prefill or reference log-probs that are missing, not finite or "
        "above 0.",
    )

    RETOKENISED = (
        "retokenised",
        "bug",
        "Responses were tokenised again: {count} of {total} have other token ids or lengths on one side.",
    )
    MISPAIRED = "mispaired", "bug", "Responses are mispaired: {count} of {total} carry the scores of another response."
    LABEL_OFFSET = (
        "label_offset",
        "bug",
        "The labels of one side are off by {shift:+d}: its scores belong to the neighbouring token.",
    )
    OTHER_BASE = "other_base", "bug", "{column} are logarithms to {base}, not natural ones."
    TRUNCATED_SUPPORT = (
        "truncated_support",
        "bug",
        "{side} samples from part of the vocabulary (top-p, top-k) and renormalises; the other side does not.",
    )
    TEMPERATURE = (
        "temperature",
        "bug",
        "The two sides use different temperatures: the training path's is {ratio:.4g} times the engine's.",
    )
    NOT_REPEATABLE = "not_repeatable", "bug", "{side} does not agree with itself: {what}."
    ONE_SIDED_DTYPE = "one_sided_dtype", "bug", "One side computes in another format than the run says: {what}."
    PROMPT_PREFIX = (
        "prompt_prefix",
        "bug",
        "The two sides read different text before the response: {what}.",
    )
    POSITIONS = "positions", "bug", "The two sides treat positions differently: {what}."
    ROUTING = "routing", "precision", "Expert routing: {what}."
    OTHER_EXPERTS = (
        "other_experts",
        "bug",
        "The two sides choose other experts in FP32, from layer {layer} on: for {share} of its tokens, with weights "
        "{distance} apart.",
    )
    CONFIGURATION = "configuration", "bug", "The two sides are set differently: {what}."
    ADAPTER = "adapter", "bug", "The two sides are set differently: {what}."
    STALE_WEIGHTS = (
        "stale_weights",
        "bug",
        "The two sides hold different weights: they disagree everywhere, by {size} nats a token, where formats cannot.",
    )
    BEYOND_FORMAT = (
        "beyond_format",
        "bug",
        "This is a bug, not precision: {sides} by more than {formats} can.",
    )

    OTHER_CHECKPOINT = (
        "other_checkpoint",
        "undecided",
        "The checkpoint is not the one that made this log{unless}: {sides} from what it computes, by more than "
        "rounding can.",
    )
    UNEXPLAINED = "unexplained", "undecided", "{what}"
    PRECISION = "precision", "precision", "Precision: the sides differ by KL {kl} a token{proof}."
    SETTINGS = "settings", "precision", "Settings: {what}; {settings} is all that differs from {beside}."
    CLEAN = "clean", "clean", "Clean: the two sides agree to {size} nats a token."

    def cause(self, evidence: Sequence[str] = (), advice: Sequence[str] = (), **figures: object) -> Cause:
        """This cause with its sentence filled in; `figures` are the names its template holds."""
        sentence = self.template.format(**figures)
        if figures.get("count") == 1:
            for many, one in _OF_ONE:
                sentence = sentence.replace(f"1 {many} ", f"1 {one} ")
        return Cause(code=self.value, sentence=sentence, evidence=list(evidence), advice=list(advice))
