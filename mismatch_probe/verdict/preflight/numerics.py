"""Formats: what computes, what is stored, what was rounded without being asked."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.dtypes import SIXTEEN_BIT, Dtype, short_name
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.codes import Code
from mismatch_probe.verdict.preflight.facts import Sides

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
