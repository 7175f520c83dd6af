"""A pair without an FP32 pair of its own, judged by the pair that differs from it in named settings alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mismatch_probe.causes import VerdictKind
from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype, sides_label
from mismatch_probe.notation import write_estimate, write_number
from mismatch_probe.records.summary import Cause, PairSummary, SettingsContrast, Verdict
from mismatch_probe.stats.catalogue import metric_words
from mismatch_probe.stats.results import Estimate
from mismatch_probe.verdict.rounding import most_by_rounding
from mismatch_probe.verdict.signatures.profile import lower_bound
from mismatch_probe.verdict.signatures.recording import MATCH_OCTAVES

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
    "adapter_merged": ("a merged adapter", "an unmerged adapter"),
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
        rounding
        for name, value in map(_name_and_value, settings)
        if name in _OF_FORMATS and (rounding := _format(value)) is not None
    ]
    return min(formats, key=lambda rounding: rounding.significand_bits, default=None)


def settings_words(settings: Sequence[str]) -> str:
    """`the FP8 KV cache and prefix caching`; a setting that has no words as it was given."""
    *first, last = map(_words, settings)
    return f"{', '.join(first)} and {last}" if first else last


def _words(setting: str) -> str:
    name, value = _name_and_value(setting)
    if name in _OF_SWITCHES and value in ("True", "False"):
        return _OF_SWITCHES[name][value == "False"]
    if name not in _WORDS or value == "None":
        return setting
    rounding = _format(value) if name in _OF_FORMATS else None
    return (
        setting
        if name in _OF_FORMATS and rounding is None
        else _WORDS[name].format(value=rounding.name if rounding else value)
    )


def _name_and_value(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition(" = ")
    return name, value


def _format(value: str) -> RoundedTo | None:
    return next((RoundedTo(name, bits) for part, name, bits in _FORMATS if part in value.lower()), None)


MODEST: Final = 3.0
"""Times that settings which name no format may make the KL as large before it is asked whether they only round."""

SPIKE: Final = 10.0
"""Times that the largest abs(d) may be before it is; of a format, over what it makes of the mean."""

_SOUND: Final = ("precision", "clean")


def with_settings_contrast(
    pair: PairSummary, contrast: SettingsContrast | None, baseline: PairSummary | None
) -> PairSummary:
    """The pair with what its settings change; where it was undecided and the other is no bug, they are the answer.

    FP32 was not run with these settings, so a bug of theirs cannot be ruled out: what they change is taken for
    rounding where it is no more than rounding in their formats makes. What both pairs share stays as the other has it.
    """
    if contrast is None or baseline is None:
        return pair
    contrast = contrast.model_copy(update=_by_rounding(pair, contrast, baseline))
    verdict = pair.verdict
    is_open = baseline.verdict.code in (Code.UNEXPLAINED, Code.SETTINGS) and baseline.verdict.kind == "undecided"
    asks = verdict.kind == "undecided" or _names_the_format(verdict, contrast)
    if asks and not pair.is_logged and (is_open or baseline.verdict.kind in _SOUND):
        is_sound = baseline.verdict.kind in _SOUND
        kind: VerdictKind = "precision" if is_sound and contrast.is_rounding else "undecided"
        cause = Cause.of(
            Code.SETTINGS,
            [what_changes(contrast), *_law(_dtype(pair, contrast), contrast), *verdict.evidence],
            _advice_on_contrast(verdict, baseline.verdict, contrast),
            what=f"{settings_answer(pair, contrast)}{rounding_words(contrast)}",
            settings=", ".join(contrast.settings),
            baseline=f"{_name_of_counterpart(contrast)}{', where FP32 agrees' if is_sound else ''}",
        )
        verdict = Verdict(kind=kind, also=verdict.also, **cause.model_dump())
    return pair.model_copy(update={"settings_contrast": contrast, "verdict": verdict})


def _names_the_format(verdict: Verdict, contrast: SettingsContrast) -> bool:
    """Whether a bug is no more than the format that the settings ask for: FP32 with an FP8 cache cannot agree."""
    is_of_format = verdict.code == Code.ONE_SIDED_DTYPE and contrast.format is not None
    return is_of_format and bool(contrast.is_rounding) and not verdict.also


def settings_answer(pair: PairSummary, contrast: SettingsContrast) -> str:
    """`the FP8 KV cache costs KL 0.047 a token, 21 [6, 52] times the same pair without it`."""
    words, many = settings_words(contrast.settings), len(contrast.settings) > 1
    if "kl_k3" not in pair.metrics:
        return f"{words} {'are' if many else 'is'} set"
    kl = f"KL {write_estimate(pair.metrics['kl_k3']).value} a token"
    ratio = contrast.ratios.get("kl_k3")
    if ratio is None:
        return f"{words} {'cost' if many else 'costs'} {kl}"
    times = f"{kl}, {write_estimate(ratio)} times the same pair without {'them' if many else 'it'}"
    if _holds_1(ratio):
        return f"{words} {'change' if many else 'changes'} nothing measurable: {times}"
    return f"{words} {'cost' if many else 'costs'} {times}"


def rounding_words(contrast: SettingsContrast) -> str:
    """Whether rounding explains it, to go on with behind the answer; empty where that is not known, or nothing is there
    to be explained.
    """
    ratio = contrast.ratios.get("kl_k3")
    if contrast.is_rounding is None or (contrast.is_rounding and ratio is not None and _holds_1(ratio)):
        return ""
    rounding = "rounding" if contrast.format is None else f"rounding to {contrast.format}"
    return f", as {rounding} can" if contrast.is_rounding else f", more than {rounding} can"


def what_changes(contrast: SettingsContrast) -> str:
    """`KL (k3) is 12 [8, 15] times that of BF16`."""
    if not contrast.ratios:
        return f"no ratio to {_name_of_counterpart(contrast)} can be had"
    name, ratio = next(iter(contrast.ratios.items()))
    return f"{metric_words(name)} is {write_estimate(ratio)} times that of {_name_of_counterpart(contrast)}"


def _by_rounding(pair: PairSummary, contrast: SettingsContrast, baseline: PairSummary) -> dict[str, object]:
    """The format that the settings round to, and whether rounding explains what they change; None where that is
    unknown: nothing says it, or settings without a format change more than another order of sums was seen to.

    An error is a multiple of a format's unit roundoff, and the settings round some of what `dtype` rounds all of. The
    margin is that within which an error is taken for another format's (`one_sided_dtype`). Without a format they change
    the order of sums: both pairs round alike.
    """
    format_of_settings = format_of(contrast.settings)
    dtype = _dtype(pair, contrast)
    most = (
        None if format_of_settings is None else max(1.0, format_of_settings.times_as_coarse(dtype)) * 2.0**MATCH_OCTAVES
    )
    update: dict[str, object] = {"format": None if format_of_settings is None else format_of_settings.name}
    largest = [deviation.metrics.get("abs_logprob_diff_max") for deviation in (pair, baseline)]
    kl, mean = (contrast.ratios.get(name) for name in ("kl_k3", "abs_logprob_diff"))
    if kl is None or mean is None or largest[0] is None or largest[1] is None:
        return update
    size = pair.metrics.get("abs_logprob_diff")
    is_beyond_all = size is not None and lower_bound(size) > most_by_rounding(
        (pair.train_dtype, pair.infer_dtype), pair.conditioning
    )
    spike = SPIKE * largest[1].value * (1.0 if most is None else max(1.0, mean.value))
    has_spike = largest[0].value > spike
    if most is None:
        is_modest = not (has_spike or (kl.value > MODEST and lower_bound(kl) > 1))
        return {**update, "is_rounding": False if is_beyond_all else is_modest or None}
    return {**update, "is_rounding": not (is_beyond_all or has_spike or lower_bound(mean) > most)}


def _law(dtype: Dtype, contrast: SettingsContrast) -> list[str]:
    rounding, mean = format_of(contrast.settings), contrast.ratios.get("abs_logprob_diff")
    if rounding is None or mean is None:
        return []
    coarse = write_number(rounding.times_as_coarse(dtype))
    return [
        f"{rounding.name} rounds {coarse} times as coarsely as {dtype.upper()}; "
        f"{metric_words('abs_logprob_diff')} is {write_estimate(mean)} times that of {_name_of_counterpart(contrast)}"
    ]


def _advice_on_contrast(verdict: Verdict, baseline: Verdict, contrast: SettingsContrast) -> list[str]:
    """What decides the counterpart, where only that is open; what decides this pair, where more than rounding is."""
    if not contrast.is_rounding:
        return verdict.advice
    return [] if baseline.kind in _SOUND else baseline.advice


def _dtype(pair: PairSummary, contrast: SettingsContrast) -> Dtype:
    """In which the side computes that has the settings."""
    return pair.infer_dtype if contrast.side == "mu" else pair.train_dtype


def _holds_1(ratio: Estimate) -> bool:
    return ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high


def _name_of_counterpart(contrast: SettingsContrast) -> str:
    return sides_label(*contrast.counterpart)
