"""Settings of the forward pass and formats that differ between the sides, and states in which it does not repeat."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype, short_name
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides, is_same_setting, reaches_forward_pass, setting_words

_BYTES: Final = "uint8"


def applied_dtypes(sides: Sides) -> Iterator[SettingFinding]:
    """The dtype asked for against the one that computes."""
    for side, where, asked, settings in (
        ("pi", "the training path", sides.train_dtype, sides.train),
        ("mu", "the engine", sides.infer_dtype, sides.infer),
    ):
        applied = settings.get("dtype")
        if applied != asked:
            yield SettingFinding(
                level="error",
                side="pi" if side == "pi" else "mu",
                setting="dtype",
                what=f"{where} was asked for {asked} and runs in {applied or 'an unknown dtype'}",
                advice="Find what overrides it: a quantisation setting, autocast, or the checkpoint's own config.",
                code=Code.DTYPE_NOT_APPLIED,
            )


def experts_apart(sides: Sides) -> Iterator[SettingFinding]:
    """Experts that the asked format does not reach: autocast casts no product that a kernel groups by expert."""
    experts = sides.train.get("experts_dtype")
    if experts is not None and experts != sides.train_dtype:
        yield SettingFinding(
            level="warning",
            side="pi",
            setting="experts_dtype",
            what=f"the training path's experts compute in {experts} and the rest of it in {sides.train_dtype}: "
            "autocast does not reach grouped products",
            advice="It is so in a trainer that uses autocast on these experts; where it casts weights or shards with "
            "FSDP, give --train-precision weights or fsdp.",
            code=Code.ONE_SIDED_DTYPE,
        )


def rounded_frequencies(sides: Sides) -> Iterator[SettingFinding]:
    """RoPE's inverse frequencies below FP32: `.to()` and `.half()` cast buffers, loading with a dtype does not."""
    held = sides.train.get("rope_inv_freq_dtype")
    if any(dtype in SIXTEEN_BIT for dtype in str(held).split("/")):
        yield SettingFinding(
            level="warning",
            side="pi",
            setting="rope_inv_freq_dtype",
            what=f"the training path holds RoPE's frequencies in {held}: angles are off, more so the further the token",
            advice="Load the model with its dtype, or cast parameters only: model.to(dtype) rounds buffers too.",
            code=Code.POSITIONS,
        )


def compressed_cache(sides: Sides) -> Iterator[SettingFinding]:
    """A KV cache in fewer bits than the arithmetic."""
    for held in sides.infer.get("kv_cache_dtypes") or ():
        if short_name(held) != sides.infer_dtype:
            yield SettingFinding(
                level="warning",
                side="mu",
                setting="kv_cache_dtypes",
                what=f"the engine keeps keys and values in {_cache_format(held, sides.infer)}",
                advice="Give --vllm.kv_cache_dtype auto to measure without; what it adds is not the dtype's doing.",
                code=Code.ONE_SIDED_DTYPE,
            )


def _cache_format(held: str, infer: Mapping[str, Any]) -> str:
    """A cache of bytes is of the format that the engine's own setting names."""
    return str(infer.get("kv_cache_dtype", held)) if held == _BYTES else held


def rounded_outputs(sides: Sides) -> Iterator[SettingFinding]:
    """A log-softmax in 16 bit, and output projections that compute in different formats."""
    log_softmax = sides.train.get("log_softmax_dtype")
    if log_softmax in SIXTEEN_BIT:
        yield SettingFinding(
            level="warning",
            side="pi",
            setting="log_softmax_dtype",
            what=f"the training path's log-softmax is rounded to {log_softmax}; engines compute it in FP32",
            advice="Set training.log_softmax_dtype to fp32.",
            code=Code.ONE_SIDED_DTYPE,
        )
    heads = (sides.train.get("lm_head_dtype"), sides.infer.get("lm_head_dtype"))
    train_head, infer_head = map(short_name, heads)
    if None not in heads and sides.train_dtype == sides.infer_dtype and train_head != infer_head:
        yield SettingFinding(
            level="note",
            setting="lm_head_dtype",
            what=f"the output projection runs in {train_head} on the training path and in {infer_head} in the engine",
            advice="Set training.lm_head_dtype, or the engine's head dtype, so that both agree.",
        )


def inexact_fp32(sides: Sides) -> Iterator[SettingFinding]:
    """FP32 products in TF32 or BF16 on either side of an FP32 pair."""
    if Dtype.FP32 not in (sides.train_dtype, sides.infer_dtype):
        return
    modes = {
        name: value
        for name, value in sides.train.items()
        if name.startswith("fp32_products") and isinstance(value, str)
    }
    lossy = {name: value for name, value in modes.items() if value not in ("ieee", "none")}
    precision = sides.infer.get("float32_matmul_precision")
    if precision not in (None, "highest"):
        lossy["float32_matmul_precision"] = precision
    for name, value in lossy.items():
        yield SettingFinding(
            level="warning",
            setting=name,
            what=f"FP32 products run with {name} = {value}, which rounds their inputs",
            advice="Set torch.set_float32_matmul_precision('highest') and TF32 off: FP32 decides between bug "
            "and precision.",
            code=Code.ONE_SIDED_DTYPE,
        )


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
