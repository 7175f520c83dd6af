"""A side's own settings in the field's words, and how coarsely those that name a format round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mismatch_probe.dtypes import Dtype

_FORMATS: Final = (
    ("e5m2", "FP8 E5M2", 3),
    ("fp4", "FP4", 2),
    ("fp8", "FP8", 4),
    ("int8", "INT8", 5),
    ("int4", "INT4", 2),
    ("4bit", "INT4", 2),
    ("awq", "INT4", 2),
    ("gptq", "INT4", 2),
    ("wna16", "INT4", 2),
    ("bfloat16", "BF16", Dtype.BF16.significand_bits),
    ("float16", "FP16", Dtype.FP16.significand_bits),
)
"""Part of a setting's value, its format, and the bits of a significand, the hidden one included; the first that fits.
Integers are spaced evenly up to the largest number of their group, of which a usual one is about a quarter."""

_OF_FORMATS: Final = ("kv_cache_dtype", "quantization")

_WORDS: Final = {
    "kv_cache_dtype": "the {value} KV cache",
    "quantization": "quantisation to {value}",
    "tensor_parallel_size": "tensor parallelism over {value}",
    "pipeline_parallel_size": "pipeline parallelism over {value}",
    "data_parallel_size": "data parallelism over {value}",
    "tensor_parallel": "tensor parallelism over {value}",
    "attention": "{value} attention",
    "attention_backend": "the attention backend {value}",
    "precision": "the precision mode {value}",
    "max_num_seqs": "{value} sequences at once",
    "max_num_batched_tokens": "{value} tokens a step",
    "url": "the server {value}",
    "checkpoint": "the checkpoint {value}",
    "adapter": "the adapter {value}",
}
_OF_SWITCHES: Final = {
    "prefix_caching": ("prefix caching", "no prefix caching"),
    "enable_prefix_caching": ("prefix caching", "no prefix caching"),
    "enable_chunked_prefill": ("chunked prefill", "no chunked prefill"),
    "enforce_eager": ("eager execution", "compilation"),
    "adapter_merged": ("a merged adapter", "an adapter beside the weights"),
}


@dataclass(frozen=True)
class RoundedTo:
    """A format in which settings keep numbers: its name, and the bits of a significand."""

    name: str
    significand_bits: int

    def times_as_coarse(self, dtype: Dtype) -> float:
        """Largest relative error of one rounding, over that of `dtype`."""
        return float(2.0 ** (dtype.significand_bits - self.significand_bits))


def format_of(settings: Sequence[str]) -> RoundedTo | None:
    """The coarsest format that these settings, each as `name = value`, round to; None where they name none."""
    formats = [
        found for name, value in map(_parted, settings) if name in _OF_FORMATS and (found := _format(value)) is not None
    ]
    return min(formats, key=lambda found: found.significand_bits, default=None)


def settings_words(settings: Sequence[str]) -> str:
    """`the FP8 KV cache and prefix caching`; a setting that has no words as it was given."""
    *first, last = map(_words, settings)
    return f"{', '.join(first)} and {last}" if first else last


def _words(setting: str) -> str:
    name, value = _parted(setting)
    if name in _OF_SWITCHES and value in ("True", "False"):
        return _OF_SWITCHES[name][value == "False"]
    if name not in _WORDS or value == "None":
        return setting
    found = _format(value) if name in _OF_FORMATS else None
    return (
        setting if name in _OF_FORMATS and found is None else _WORDS[name].format(value=found.name if found else value)
    )


def _parted(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition(" = ")
    return name, value


def _format(value: str) -> RoundedTo | None:
    return next((RoundedTo(name, bits) for part, name, bits in _FORMATS if part in value.lower()), None)
