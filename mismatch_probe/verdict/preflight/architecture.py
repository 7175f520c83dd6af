"""Settings of the forward pass that differ between the sides, and states in which it does not repeat."""

from collections.abc import Iterator
from typing import Any

from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.facts import Sides, is_same_setting, reaches_forward_pass, setting_words

CAUSE_OF_KEY: tuple[tuple[str, Code], ...] = (
    ("rope", Code.POSITIONS),
    ("rotary", Code.POSITIONS),
    ("sliding_window", Code.POSITIONS),
    ("max_window_layers", Code.POSITIONS),
    ("layer_types", Code.POSITIONS),
    ("attention_chunk_size", Code.POSITIONS),
    ("expert", Code.ROUTING),
    ("topk", Code.ROUTING),
    ("router", Code.ROUTING),
    ("logit_scale", Code.TEMPERATURE),
    ("logits_scaling", Code.TEMPERATURE),
)
"""Part of a configuration key, and the cause that its difference makes; the first that fits."""


def forward_pass(sides: Sides) -> Iterator[SettingFinding]:
    """Every setting of the forward pass with another value on the other side."""
    for name, (ours, theirs) in _differing(sides).items():
        yield SettingFinding(
            level="error",
            setting=name,
            what=setting_words(name, ours, theirs),
            advice=_advice(sides),
            code=next((code for part, code in CAUSE_OF_KEY if part in name), Code.CONFIGURATION),
        )


def _differing(sides: Sides) -> dict[str, tuple[Any, Any]]:
    """As both sides loaded it; of an engine that does not say, such as a server, what both checkpoints' files set."""
    if sides.facts is not None:
        train, infer = sides.facts
        return {
            name: (train.get(name), infer.get(name))
            for name in sorted(train.keys() | infer.keys())
            if not is_same_setting(train.get(name), infer.get(name))
        }
    if sides.difference is None:
        return {}
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in sorted(sides.difference.config.items())
        if reaches_forward_pass(name) and None not in (ours, theirs) and not is_same_setting(ours, theirs)
    }


def _advice(sides: Sides) -> str:
    if sides.difference is None:
        return "Give both sides the same checkpoint config; look for overrides (--vllm.hf_overrides)."
    if sides.difference.weights.are_other:
        return "Give both checkpoints one config.json."
    return "Give both checkpoints one config.json; their weights are equal, so that none have to be sent."


def attention(sides: Sides) -> Iterator[SettingFinding]:
    """An attention of the training path that leaves out a part of the architecture, or that was chosen so as not to."""
    left_out = sides.train.get("sdpa_leaves_out")
    if left_out is None:
        return
    running = sides.train.get("attention")
    if running == "sdpa":
        yield SettingFinding(
            level="error",
            side="pi",
            setting="attention",
            what=f"the training path's sdpa attention leaves out {left_out}",
            advice="Train and score with eager attention (--attention eager), or one that has it.",
        )
    else:
        yield SettingFinding(
            level="note",
            side="pi",
            setting="attention",
            what=f"the training path runs {running} attention, since sdpa would leave out {left_out}",
            advice="See that the trainer does so too: where it runs sdpa, the two sides differ in FP32 as well.",
        )


def following_positions(sides: Sides) -> Iterator[SettingFinding]:
    """Rotary frequencies that depend on how long the sequences are that share a forward pass."""
    limit = sides.train.get("rope_follows_length_beyond")
    if limit is not None:
        yield SettingFinding(
            level="note",
            setting="rope_follows_length_beyond",
            what=f"the model's rotary frequencies follow the longest sequence of a forward pass beyond {limit} tokens: "
            "here each longer sequence is computed alone, so that nothing else changes its numbers",
            advice="A trainer whose batches hold such sequences computes other numbers, and an engine has one set of "
            "frequencies for all lengths: keep sequences below that, or compare at the length that you train at.",
            code=Code.POSITIONS,
        )


def bounded_steps(sides: Sides) -> Iterator[SettingFinding]:
    """A step of the engine that the probe made smaller than the engine's own default."""
    tokens = sides.infer.get("bounded_by_probe", {}).get("max_num_batched_tokens")
    if tokens is not None:
        yield SettingFinding(
            level="note",
            side="mu",
            setting="max_num_batched_tokens",
            what=f"the engine takes at most {tokens} tokens a step, fewer than by default, so that log-probs of this "
            "vocabulary fit while it replays; a server with larger steps can use other kernels",
            advice="Give --vllm.max_num_batched_tokens the server's value, and the memory it takes, to measure that.",
        )


def eager_by_default(sides: Sides) -> Iterator[SettingFinding]:
    """An engine that runs eagerly because nobody asked it to compile, as on a CPU."""
    if sides.infer.get("chosen_by_probe", {}).get("enforce_eager"):
        yield SettingFinding(
            level="note",
            side="mu",
            setting="enforce_eager",
            what="the engine runs eagerly: on a CPU compiling takes longer than it saves, and nothing was said of it; "
            "a compiled engine can round otherwise",
            advice="Give --vllm.enforce_eager false to measure a compiled engine.",
        )


def states(sides: Sides) -> Iterator[SettingFinding]:
    """Dropout at work, and caches and shortcuts whose results can depend on what ran before."""
    if sides.train.get("dropout") == "on":
        yield SettingFinding(
            level="error",
            side="pi",
            setting="dropout",
            what="the training path is in training mode: dropout is active, so its log-probs do not repeat",
            advice="Call model.eval() before scoring.",
            code=Code.NOT_REPEATABLE,
        )
    for name, value in sides.stated("prefix_caching", "speculative_config"):
        if value:
            yield SettingFinding(
                level="note",
                side="mu",
                setting=name,
                what=f"the engine runs with {name} = {value}: its log-probs can depend on earlier requests",
                advice="Switch it off to rule it out, and reset the prefix cache after every weight update.",
                code=Code.NOT_REPEATABLE,
            )
