"""Causes that only an explanation names; the others are those of every verdict."""

from enum import StrEnum
from typing import Final

from mismatch_probe.records.summary import Kind
from mismatch_probe.verdict.codes import Code


class LogCode(StrEnum):
    AS_DECLARED = "as_declared"
    RAW_LOGPROBS = "raw_logprobs"
    PACKING = "packing"


KINDS: Final[dict[str, Kind]] = {
    **{code.value: code.kind for code in Code},
    LogCode.AS_DECLARED: "clean",
    LogCode.RAW_LOGPROBS: "bug",
    LogCode.PACKING: "bug",
}
"""How each cause is to be taken."""

ADVICE: Final[dict[str, str]] = {
    Code.TEMPERATURE: "Divide the logits of both sides by the same temperature; look at the generation_config, too.",
    Code.TRUNCATED_SUPPORT: "Sample without top-p, top-k and min-p, or give the trainer the tokens that were kept.",
    LogCode.RAW_LOGPROBS: "Have the engine return processed log-probs (vLLM: logprobs_mode = processed_logprobs).",
    Code.PROMPT_PREFIX: "Give both sides the same token ids instead of a text that each encodes or templates again.",
    Code.POSITIONS: "Compare config.json, position ids and padding of both sides.",
    LogCode.PACKING: "Pass position ids or sequence lengths that reset attention at every packed response.",
    Code.NOT_REPEATABLE: "Put the model into evaluation mode for log-probs, and set its dropout to 0.",
    Code.LABEL_OFFSET: "Read the log-prob of a token from the logits before it.",
    Code.OTHER_BASE: "Write natural logarithms, or multiply the column by ln 2 or ln 10.",
    Code.MISPAIRED: "Join both sides by a response id, not by order; look for a sort or a shuffle between them.",
    Code.STALE_WEIGHTS: "Look at when weights are handed over, and at caches that are kept across it.",
    Code.ONE_SIDED_DTYPE: "Say in which format each side computes, or set the one that departs to what was meant.",
    Code.MISSING_LOGPROBS: "Have log-probs recorded for every sampled token, and never read a missing one as 0.",
}
