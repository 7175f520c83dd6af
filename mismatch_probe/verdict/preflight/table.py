"""Rules of one setting, or of the same setting on both sides, as a table: what is read, when it holds, its words."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import COARSE, short_name
from mismatch_probe.notation import write_number
from mismatch_probe.records.summary import SettingFinding
from mismatch_probe.verdict.preflight.facts import Sides

BY_CHANCE: Final = 1e-6
"""Tokens this improbable under the log-probs that came with them were drawn from another distribution."""


@dataclass(frozen=True)
class SettingRule:
    """One rule: `what` and `advice` name the values read by their place, `{0}` for the first."""

    setting: str
    """As findings name it."""
    reads: tuple[str, ...]
    """Paths of the values: `train.` or `infer.` and a key of that side's settings, or a name of `Sides`."""
    holds: Callable[..., bool]
    """Whether these values make the rule speak."""
    level: Literal["error", "warning", "note"]
    what: str
    advice: str
    side: Literal["pi", "mu"] | None = None
    """The one to fix, None where it is both or either."""
    code: Code | None = None
    """The cause that it would produce, None where it could be several."""
    of_a_server: bool = False
    """Whether it applies to an engine's side that is a server alone; others apply to every side."""
    write_value: Callable[[Any], Any] | None = None
    """How sentences write a value; None: a format by its short name, anything else as it is."""

    @property
    def __name__(self) -> str:
        return self.setting

    def __call__(self, sides: Sides) -> Iterator[SettingFinding]:
        if self.of_a_server and not is_server(sides):
            return
        values = [_value(sides, path) for path in self.reads]
        if self.holds(*values):
            yield SettingFinding(
                level=self.level,
                side=self.side,
                setting=self.setting,
                what=self.what.format(*map(self.write_value or _with_short_name, values)),
                advice=self.advice,
                code=self.code,
            )


def is_server(sides: Sides) -> bool:
    """Whether the engine's side is a server that was asked what it does."""
    return sides.infer.get("engine") == "server" and isinstance(sides.infer.get("asked"), dict)


def _value(sides: Sides, path: str) -> Any:
    name, *keys = path.split(".")
    value = getattr(sides, name)
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _with_short_name(value: Any) -> Any:
    if value is None:
        return "an unknown dtype"
    return short_name(value) if isinstance(value, str) else value


def _is_set(value: Any) -> bool:
    return value is not None


def are_different(first: Any, second: Any) -> bool:
    return first is not None and second is not None and first != second


def _other_than(*usual: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in usual


def _is_coarse(name: Any) -> bool:
    return any(part in COARSE for part in str(name).split("/"))


def _heads_differ(train: Any, infer: Any, train_dtype: Any, infer_dtype: Any) -> bool:
    return train_dtype == infer_dtype and are_different(train and short_name(train), infer and short_name(infer))


ASKED: Final = tuple(
    SettingRule(
        "dtype",
        (f"{side}.dtype", f"{side}_dtype"),
        lambda actual, asked_dtype: actual != asked_dtype,
        "error",
        f"{where} was asked for {{1}} and runs in {{0}}",
        "Find what overrides it: a quantisation setting, autocast, or the checkpoint's own config.",
        side="pi" if side == "train" else "mu",
        code=Code.DTYPE_NOT_APPLIED,
    )
    for side, where in (("train", "the training path"), ("infer", "the engine"))
)
"""The dtype asked for against the one that computes."""

_NEUTRAL: Final = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}
"""Sampling settings besides temperature, top-p and top-k, and the values at which they do nothing."""

SAMPLING: Final = (
    SettingRule(
        "temperature",
        ("train.temperature", "infer.replay_temperature"),
        are_different,
        "error",
        "the engine samples at temperature {1:g}, the training path scores at {0:g}",
        "Divide the training path's logits by the sampling temperature.",
        code=Code.TEMPERATURE,
    ),
    SettingRule(
        "top_p, top_k",
        ("infer.decode_support",),
        _other_than("full vocabulary"),
        "error",
        "the engine's distribution is {0}; the training path's covers the whole vocabulary",
        "Sample with top_p=1 and top_k=0, or expect d = log of the kept mass on top of the mismatch.",
        side="mu",
        code=Code.TRUNCATED_SUPPORT,
    ),
    *(
        SettingRule(
            name,
            (f"infer.{name}",),
            _other_than(neutral),
            "error",
            f"the engine samples with {name} = {{0}}, which the training path does not repeat",
            f"Sample with {name} = {neutral:g}.",
            side="mu",
            code=Code.TRUNCATED_SUPPORT if name == "min_p" else None,
        )
        for name, neutral in _NEUTRAL.items()
    ),
    SettingRule(
        "generation_config",
        ("infer.generation_config",),
        _other_than("vllm"),
        "warning",
        "the engine takes sampling defaults from generation_config = {0}; the training path does not",
        "Start the engine with generation_config='vllm' and set temperature, top-p and top-k yourself.",
        side="mu",
        code=Code.TRUNCATED_SUPPORT,
    ),
    SettingRule(
        "logprobs_mode",
        ("infer.logprobs_mode",),
        _other_than("processed_logprobs"),
        "error",
        "the engine returns {0}: not those of the distribution it samples from",
        "Start the engine with logprobs_mode=processed_logprobs.",
        side="mu",
        code=Code.TEMPERATURE,
    ),
)
"""What shapes the distribution sampled from, and whether the log-probs on both sides are of it."""

FORWARD: Final = (
    SettingRule(
        "attention",
        ("train.attention", "train.sdpa_leaves_out"),
        lambda running, part: running == "sdpa" and part is not None,
        "error",
        "the training path's sdpa attention leaves out {1}",
        "Train and score with eager attention (--attention eager), or one that has it.",
        side="pi",
    ),
    SettingRule(
        "attention",
        ("train.attention", "train.sdpa_leaves_out"),
        lambda running, part: running != "sdpa" and part is not None,
        "note",
        "the training path runs {0} attention, since sdpa would leave out {1}",
        "See that the trainer does so too: where it runs sdpa, the two sides differ in FP32 as well.",
        side="pi",
    ),
    SettingRule(
        "rope_follows_length_beyond",
        ("train.rope_follows_length_beyond",),
        _is_set,
        "note",
        "the model's rotary frequencies follow the longest sequence of a forward pass beyond {0} tokens: here each "
        "longer sequence is computed alone, so that nothing else changes its numbers",
        "A trainer whose batches hold such sequences computes other numbers, and an engine has one set of frequencies "
        "for all lengths: keep sequences below that, or compare at the length that you train at.",
        code=Code.POSITIONS,
    ),
    SettingRule(
        "max_num_batched_tokens",
        ("infer.bounded_by_probe.max_num_batched_tokens",),
        _is_set,
        "note",
        "the engine takes at most {0} tokens a step, fewer than by default, so that log-probs of this vocabulary fit "
        "while it replays; a server with larger steps can use other kernels",
        "Give --vllm.max_num_batched_tokens the server's value, and the memory it takes, to measure that.",
        side="mu",
    ),
    SettingRule(
        "enforce_eager",
        ("infer.chosen_by_probe.enforce_eager",),
        bool,
        "note",
        "the engine runs eagerly: on a CPU compiling takes longer than it saves, and no setting decides it; a "
        "compiled engine can round otherwise",
        "Give --vllm.enforce_eager false to measure a compiled engine.",
        side="mu",
    ),
    SettingRule(
        "dropout",
        ("train.dropout",),
        lambda state: state == "on",
        "error",
        "the training path is in training mode: dropout is active, so its log-probs do not repeat",
        "Call model.eval() before scoring.",
        side="pi",
        code=Code.NOT_REPEATABLE,
    ),
    *(
        SettingRule(
            name,
            (f"infer.{name}",),
            bool,
            "note",
            f"the engine runs with {name} = {{0}}: its log-probs can depend on earlier requests",
            "Switch it off to rule it out, and reset the prefix cache after every weight update.",
            side="mu",
            code=Code.NOT_REPEATABLE,
        )
        for name in ("prefix_caching", "speculative_config")
    ),
    SettingRule(
        "rope_inv_freq_dtype",
        ("train.rope_inv_freq_dtype",),
        _is_coarse,
        "warning",
        "the training path holds RoPE's frequencies in {0}: angles are off, more so the further the token",
        "Load the model with its dtype, or cast parameters only: model.to(dtype) rounds buffers too.",
        side="pi",
        code=Code.POSITIONS,
    ),
)
"""Parts of the forward pass that were left out or chosen, and states in which it does not repeat."""

FORMATS: Final = (
    SettingRule(
        "state_dtypes",
        ("infer.state_dtypes",),
        lambda dtypes: any(map(_is_coarse, map(short_name, dtypes or ()))),
        "warning",
        "the engine keeps the state of recurrent layers in {0} from token to token; the training path carries it in "
        "FP32",
        "Give --vllm.mamba_ssm_cache_dtype float32, which rounds nothing while it decodes, and measure again.",
        side="mu",
        code=Code.ONE_SIDED_DTYPE,
        write_value=lambda dtypes: " and ".join(short_name(dtype).upper() for dtype in dtypes),
    ),
    SettingRule(
        "experts_dtype",
        ("train.experts_dtype", "train_dtype"),
        are_different,
        "warning",
        "the training path's experts compute in {0} and the rest of it in {1}: autocast does not reach grouped "
        "products",
        "It is so in a trainer that uses autocast on these experts; where it casts weights or shards with FSDP, give "
        "--train-precision weights or fsdp.",
        side="pi",
        code=Code.ONE_SIDED_DTYPE,
    ),
    SettingRule(
        "log_softmax_dtype",
        ("train.log_softmax_dtype",),
        _is_coarse,
        "warning",
        "the training path's log-softmax is rounded to {0}; engines compute it in FP32",
        "Set training.log_softmax_dtype to fp32.",
        side="pi",
        code=Code.ONE_SIDED_DTYPE,
    ),
    SettingRule(
        "lm_head_dtype",
        ("train.lm_head_dtype", "infer.lm_head_dtype", "train_dtype", "infer_dtype"),
        _heads_differ,
        "note",
        "the output projection runs in {0} on the training path and in {1} in the engine",
        "Set training.lm_head_dtype, or the engine's head dtype, so that both agree.",
    ),
)
"""Parts that compute in another format than the rest of their side."""

SERVER_SAMPLING: Final = (
    SettingRule(
        "asked.sampled_as_said",
        ("infer.asked.sampled_as_said",),
        lambda p_value: p_value is not None and p_value < BY_CHANCE,
        "error",
        "the server does not draw its tokens from the log-probs that it gives (p = {0}): it applies a temperature, a "
        "truncation or a penalty that its log-probs do not have",
        "Find what changes sampling on the way: the server's defaults, a proxy, a logits processor.",
        side="mu",
        code=Code.TEMPERATURE,
        of_a_server=True,
        write_value=write_number,
    ),
    SettingRule(
        "asked.log_probs",
        ("infer.asked.log_probs", "infer.replay_temperature"),
        lambda log_probs, temperature: log_probs is None and temperature != 1,
        "warning",
        "whether the server's log-probs are those before or after temperature is not known",
        "Sample at temperature 1, where both are the same.",
        side="mu",
        code=Code.TEMPERATURE,
        of_a_server=True,
    ),
    SettingRule(
        "dtype",
        ("infer.dtype_known_from", "infer_dtype"),
        lambda source, _: source != "the server",
        "note",
        "the server does not say in which dtype it computes: {1} is what the side was given",
        "Give the dtype that the server was started with: url=...,dtype=fp16.",
        side="mu",
        of_a_server=True,
    ),
)
"""What a server does not say, and what the requests to it showed."""

SERVER_IDENTITY: Final = (
    SettingRule(
        "weight_version",
        ("infer.weights_are_labelled",),
        lambda are_labelled: not are_labelled,
        "note",
        "the server does not label its weights: that they stayed the same shows in its answer to one question that was "
        "asked again and again, which a small step of training does not change",
        "Have the trainer label each update (vLLM: /update_weight_version, SGLang: weight_version).",
        side="mu",
        code=Code.STALE_WEIGHTS,
        of_a_server=True,
    ),
    SettingRule(
        "asked.echoes_prompt_ids",
        ("infer.asked.echoes_prompt_ids",),
        lambda echoes: not echoes,
        "warning",
        "the server does not echo the prompt's token ids, so nothing shows that it ran on those given",
        "Start vLLM with --enable-scale-out, or update the server.",
        side="mu",
        code=Code.PROMPT_PREFIX,
        of_a_server=True,
    ),
    SettingRule(
        "asked.refuses_unknown_ids",
        ("infer.asked.refuses_unknown_ids",),
        lambda refuses: refuses is False,
        "warning",
        "the server takes a token id that the checkpoint does not have: it may serve another model",
        "Compare the vocabulary of the served model with the checkpoint's.",
        side="mu",
        code=Code.STALE_WEIGHTS,
        of_a_server=True,
    ),
)

SERVER_PREFILL: Final = SettingRule(
    "prefill",
    ("infer.prefill",),
    lambda prefill: not prefill,
    "note",
    "the server was not asked for prompt log-probs, whole distributions or experts: nothing is known of decoding "
    "against prefill, of where in the context a deviation sets in, or of the exact KL",
    "Where the server has memory to spare, prefill=true asks for prompt log-probs one response at a time; they have "
    "ended production servers.",
    side="mu",
    of_a_server=True,
)
