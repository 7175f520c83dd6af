"""Rules that read more than one setting at a time: the forward pass, caches, prompts, and what a server answers."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype, short_name
from mismatch_probe.inert import plain
from mismatch_probe.notation import write_count, write_many, write_number
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import (
    AGREEMENT,
    Sides,
    contradiction,
    is_same_setting,
    reaches_forward_pass,
    setting_words,
)
from mismatch_probe.verdict.preflight.table import SettingRule, are_different, is_server

PROMPT_START: Final = "prompt_start"

_BYTES: Final = "uint8"
_ONE_POLICY: Final = 0.05
"""Nats by which one engine in 16 bit moves a likely token's log-prob at most when it is asked again."""
_ONE_POLICY_IN_A_CROWD: Final = 0.5
"""The same of any token among other requests, whose number decides how sums are split: a healthy server of
SmolLM2-135M in BF16 moved one by 0.21."""


def compressed_cache(sides: Sides) -> Iterator[SettingFinding]:
    """A KV cache in fewer bits than the arithmetic."""
    for dtype in sides.infer.get("kv_cache_dtypes") or ():
        if short_name(dtype) != sides.infer_dtype:
            yield SettingFinding(
                level="warning",
                side="mu",
                setting="kv_cache_dtypes",
                what=f"the engine keeps keys and values in {_cache_format(dtype, sides.infer)}",
                advice="Give --vllm.kv_cache_dtype auto to measure without; what it adds is not the dtype's doing.",
                code=Code.ONE_SIDED_DTYPE,
            )


def _cache_format(dtype: str, infer: Mapping[str, Any]) -> str:
    """A cache of bytes is of the format that the engine's own setting names."""
    return str(infer.get("kv_cache_dtype", dtype)) if dtype == _BYTES else dtype


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


IMAGES: Final = (
    SettingRule(
        "images.other_pixels",
        ("infer.images.other_pixels", "infer.images.num_prompts"),
        lambda number, _: bool(number),
        "error",
        "of {0} of {1} prompts with images the engine prepared other pixels than the checkpoint's processor, whose "
        "pixels the training path has",
        "Give both sides one processor with one set of arguments; leave --vllm.mm_processor_kwargs out.",
        side="mu",
        code=Code.CONFIGURATION,
    ),
    SettingRule(
        "images.attention",
        ("train.images.attention", "infer.images.attention"),
        are_different,
        "error",
        "the tokens of an image see {0} on the training path and {1} in the engine",
        "Run the engine where its attention has both directions for images (vLLM on a GPU with TRITON_ATTN or "
        "FLEX_ATTENTION; not on a CPU), or score as it does.",
        code=Code.CONFIGURATION,
        write_value=lambda attention: "each other" if attention == "both ways" else "only what is before them",
    ),
)
"""The pixels of prompts' images on both sides, and how their tokens see each other."""


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
            advice=_advice_on_forward_pass(sides),
            code=next((code for part, code in CAUSE_OF_KEY if part in name), Code.CONFIGURATION),
        )


def _differing(sides: Sides) -> dict[str, tuple[Any, Any]]:
    """As both sides loaded it; of an engine that does not say, such as a server, what both checkpoints' files set."""
    if sides.facts is not None:
        train, infer = sides.facts
        return {
            name: (train.get(name), infer.get(name))
            for name in sorted(train.keys() | infer.keys())
            if not is_same_setting(_value_or_default(train, name), _value_or_default(infer, name))
        }
    if sides.difference is None:
        return {}
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in sorted(sides.difference.config.items())
        if reaches_forward_pass(name) and None not in (ours, theirs) and not is_same_setting(ours, theirs)
    }


_DEFAULTS: Final = {"partial_rotary_factor": 1}
"""Settings that one side may leave out, by the last part of their names, with what that means."""


def _value_or_default(settings: Mapping[str, Any], name: str) -> Any:
    value = settings.get(name)
    return _DEFAULTS.get(name.rpartition(".")[2]) if value is None else value


def _advice_on_forward_pass(sides: Sides) -> str:
    if sides.difference is None:
        return "Give both sides the same checkpoint config; look for overrides (--vllm.hf_overrides)."
    if sides.difference.weights.are_other:
        return "Give both checkpoints one config.json."
    return "Give both checkpoints one config.json; their weights are equal, so that none have to be sent."


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


def reference(sides: Sides) -> Iterator[SettingFinding]:
    """A reference whose passes over the same tokens contradict each other, as with a fallback of a recurrent layer."""
    what = contradiction(sides.reference)
    if what is not None:
        yield SettingFinding(
            level="warning",
            setting=AGREEMENT,
            what=f"{what}; its numbers are left out, and the verdict does not rest on them",
            advice="The reference contradicts itself and is left out: install the kernels that the architecture's code "
            "asks for when it is loaded (recurrent layers: flash-linear-attention, causal-conv1d, mamba-ssm), or "
            "another version of transformers, and compare anew.",
        )


def model_root(sides: Sides) -> Iterator[SettingFinding]:
    """A server that says that it serves another checkpoint than this run takes."""
    root, checkpoint = sides.infer.get("model_root"), None if sides.checkpoints is None else sides.checkpoints[1]
    if not (is_server(sides) and root and checkpoint):
        return
    adapter = (sides.infer.get("adapter") or {}).get("folder", "")
    if _last(root) not in map(_last, (adapter, checkpoint.folder, checkpoint.name)):
        yield _finding_of_engine(
            "note",
            "model_root",
            f"the server says that it serves {root}, and this run takes {checkpoint.name}: only the log-probs show "
            "whether they are the same",
            "See that both are one checkpoint, or give the side the one it serves: url=...,checkpoint=FOLDER.",
            Code.STALE_WEIGHTS,
        )


def _last(path: str) -> str:
    """The last name of a folder or a hub id."""
    return path.rstrip("/").rpartition("/")[2]


def mixture(sides: Sides) -> Iterator[SettingFinding]:
    """Several replicas behind one address, by what they say or by answers that no single one gives."""
    if not is_server(sides):
        return
    measurements = sides.infer["asked"]
    processes = measurements.get("processes") or 1
    change_when_repeated, change_in_a_crowd = measurements.get("again") or 0.0, measurements.get("in_a_crowd") or 0.0
    change = max(change_when_repeated, change_in_a_crowd)
    is_mixture = change_when_repeated > _ONE_POLICY or (
        measurements.get("processes") != 1 and change_in_a_crowd > _ONE_POLICY_IN_A_CROWD
    )
    who = f"{processes} servers answer at this address" if processes > 1 else "what answers at this address"
    advice = 'Give each replica\'s own address, which checks and measures each: url=["http://...", "http://..."].'
    if is_mixture:
        yield _finding_of_engine(
            "warning",
            "asked.again, asked.in_a_crowd",
            f"{who} {'and give' if processes > 1 else 'gives'} one question answers that lie up to "
            f"{write_number(change)} nats apart: replicas with other weights or settings, measured as a mixture",
            advice,
            Code.STALE_WEIGHTS,
        )
    elif processes > 1:
        yield _finding_of_engine(
            "note",
            "asked.processes",
            f"{who} and are measured as one: they answer one question alike, within {write_number(change)} nats, as "
            "weights that are a small step of training apart do too",
            advice,
        )


def noise(sides: Sides) -> Iterator[SettingFinding]:
    """A server that gives one response other log-probs each time."""
    if not is_server(sides):
        return
    answers = sides.infer["asked"]
    changes_by_condition = {
        "asked for a second time": answers.get("again"),
        "asked among others": answers.get("in_a_crowd"),
        "read from its prefix cache": answers.get("behind_the_cache"),
    }
    changes = [f"{write_number(value)} nats when {how}" for how, value in changes_by_condition.items() if value]
    if changes:
        yield _finding_of_engine(
            "note",
            "asked.again, asked.in_a_crowd, asked.behind_the_cache",
            f"one response of the server has other log-probs each time: by up to {', '.join(changes)}",
            "No deviation smaller than this is the dtype's; vLLM: VLLM_BATCH_INVARIANT=1, SGLang: "
            "--enable-deterministic-inference.",
        )


def _finding_of_engine(level: Any, setting: str, what: str, advice: str, code: Code | None = None) -> SettingFinding:
    return SettingFinding(level=level, side="mu", setting=setting, what=what, advice=advice, code=code)
