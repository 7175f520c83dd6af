"""What shapes the distribution sampled from, and whether the log-probs on both sides are of it."""

from collections.abc import Iterator
from typing import Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_count, write_many
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides

PROMPT_START: Final = "prompt_start"

NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
"""Sampling settings besides temperature, top-p and top-k, and the values at which they do nothing."""


def temperatures(sides: Sides) -> Iterator[SettingFinding]:
    """The sampling temperature against the one that the training path divides logits by."""
    train, infer = sides.train.get("temperature"), sides.infer.get("replay_temperature")
    if train is not None and infer is not None and train != infer:
        yield SettingFinding(
            level="error",
            setting="temperature",
            what=f"the engine samples at temperature {infer:g}, the training path scores at {train:g}",
            advice="Divide the training path's logits by the sampling temperature.",
            code=Code.TEMPERATURE,
        )


def supports(sides: Sides) -> Iterator[SettingFinding]:
    """Top-p, top-k and penalties, which the training path does not repeat."""
    support = sides.infer.get("decode_support")
    if support is not None and support != "full vocabulary":
        yield SettingFinding(
            level="error",
            side="mu",
            setting="top_p, top_k",
            what=f"the engine's distribution is {support}; the training path's covers the whole vocabulary",
            advice="Sample with top_p=1 and top_k=0, or expect d = log of the kept mass on top of the mismatch.",
            code=Code.TRUNCATED_SUPPORT,
        )
    for name, value in sides.stated(*NEUTRAL):
        if value != NEUTRAL[name]:
            yield SettingFinding(
                level="error",
                side="mu",
                setting=name,
                what=f"the engine samples with {name} = {value}, which the training path does not repeat",
                advice=f"Sample with {name} = {NEUTRAL[name]:g}.",
                code=Code.TRUNCATED_SUPPORT if name == "min_p" else None,
            )


def defaults_picked_up(sides: Sides) -> Iterator[SettingFinding]:
    """Sampling defaults of the checkpoint that only the engine reads, and log-probs from before they act."""
    source = sides.infer.get("generation_config")
    if source not in (None, "vllm"):
        yield SettingFinding(
            level="warning",
            side="mu",
            setting="generation_config",
            what=f"the engine takes sampling defaults from generation_config = {source}; the training path does not",
            advice="Start the engine with generation_config='vllm' and set temperature, top-p and top-k yourself.",
            code=Code.TRUNCATED_SUPPORT,
        )
    mode = sides.infer.get("logprobs_mode")
    if mode not in (None, "processed_logprobs"):
        yield SettingFinding(
            level="error",
            side="mu",
            setting="logprobs_mode",
            what=f"the engine returns {mode}: not those of the distribution it samples from",
            advice="Start the engine with logprobs_mode=processed_logprobs.",
            code=Code.TEMPERATURE,
        )


def prompt_starts(sides: Sides) -> Iterator[SettingFinding]:
    """The beginning of sequence twice, once from the template and once from the tokenizer; or missing in a family whose
    texts begin with it.
    """
    if sides.lacking_start is not None and sides.lacking_start[1]:
        token, number, of_all = sides.lacking_start
        yield SettingFinding(
            level="warning",
            setting=PROMPT_START,
            what=f"{write_count(number)} of {write_many(of_all, 'prompt')} {'does' if number == 1 else 'do'} not begin "
            f"with {plain(token)}, as every text of this model's family does",
            advice="Encode prompts with the tokenizer's special tokens, or put it before the text: without it the "
            "model reads what it never saw in training, and a stack that adds it reads other prompts.",
            code=Code.PROMPT_PREFIX,
        )
    if sides.doubled_first_token is not None:
        yield SettingFinding(
            level="note",
            setting="prompts",
            what=f"every prompt begins with token {sides.doubled_first_token} twice, as when both the template and the "
            "tokenizer add BOS; both sides read the same ids here, a stack that encodes them anew may not",
            advice="Drop BOS from the template's text or from the tokenizer's special tokens.",
            code=Code.PROMPT_PREFIX,
        )
