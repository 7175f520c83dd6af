"""The settings that really run: formats, kernels, flags and devices, read back from a model and short passes; and
whether a model agrees with itself.
"""

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from mismatch_probe.config.model import Offload
from mismatch_probe.dtypes import COARSE, short_name
from mismatch_probe.errors import EngineError, UsageError, message_of
from mismatch_probe.training_path.arithmetic import Arithmetic, fp32_by_onednn, product_flags
from mismatch_probe.training_path.batching import ChunkedHead
from mismatch_probe.training_path.loading import follows_length_beyond, sdpa_leaves_out
from mismatch_probe.verdict.preflight.facts import forward_facts

ADAPTER_FACTS: Final = "_adapter_facts"
"""The attribute of a model that has the facts of its adapter."""
_PLACES_OF_OFFLOAD: Final[dict[Offload | None, frozenset[str]]] = {
    None: frozenset(),
    "cpu": frozenset({"cpu"}),
    "disk": frozenset({"cpu", "disk"}),
}


def placement(model: PreTrainedModel) -> dict[str, str] | None:
    """The device of each module as accelerate chose it; None where the whole model is on one."""
    device_map: dict[str, Any] | None = getattr(model, "hf_device_map", None)
    return None if device_map is None else {name: str(_device_of_place(place)) for name, place in device_map.items()}


def _device_of_place(place: Any) -> Any:
    """The device of a place; accelerate writes a GPU as its number."""
    return torch.device("cuda", place) if isinstance(place, int) else place


def require_as_asked(
    folder: Path, model: PreTrainedModel, device: torch.device, offload: Offload | None, *, instead: str | None = None
) -> None:
    """
    instead: the advice for a model that is never offloaded, the reference; None for one that may be.

    Raises:
        UsageError: modules stand on the CPU or on disk, and neither `device` nor `offload` asks for that.
    """
    offload = None if instead else offload
    expected_places = _PLACES_OF_OFFLOAD[offload] | {device.type}
    counts = Counter((placement(model) or {}).values())
    other_places = {
        place: count for place, count in counts.items() if place in ("cpu", "disk") and place not in expected_places
    }
    if other_places:
        where = " and ".join(
            f"{count} on {'the CPU' if place == 'cpu' else place}" for place, count in other_places.items()
        )
        advice = f'ask for it with training.offload = "{"disk" if "disk" in other_places else "cpu"}"'
        raise UsageError(
            f"training.device_map put modules of {folder} where no GPU computes ({where} of {counts.total()}), which "
            f"is slow; give more or larger GPUs, or {instead or advice}"
        )


aten = torch.ops.aten
_GROUPED: Final = aten._grouped_mm.default
_PRODUCTS: Final = (aten.mm.default, aten.addmm.default, aten.bmm.default, _GROUPED)


class ProductFormats(TorchDispatchMode):
    """Counts the multiplications of matrix products by the format of their inputs.

    `grouped` counts those of experts in one kernel, which autocast does not reach; `multiplications` includes them.
    Products with weights decide what prevails: a recurrent layer multiplies its states in FP32 whatever its dtype is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiplications: Counter[str] = Counter()
        self.grouped: Counter[str] = Counter()
        self._without_weights: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            factor = args[1] if func is aten.addmm.default else args[0]
            count = {short_name(factor.dtype): result.numel() * factor.shape[-1]}
            self.multiplications.update(count)
            if func is _GROUPED:
                self.grouped.update(count)
            if func is aten.bmm.default:
                self._without_weights.update(count)
        return result

    @property
    def prevailing(self) -> str:
        """The format of most multiplications."""
        return self._most_common(self.multiplications)

    @property
    def prevailing_outside_experts(self) -> str:
        """The format of most multiplications that are not grouped by expert."""
        return self._most_common(self.multiplications - self.grouped)

    def _most_common(self, multiplications: Counter[str]) -> str:
        with_weights = multiplications - self._without_weights
        return (with_weights or multiplications).most_common(1)[0][0]

    @property
    def prevailing_in_experts(self) -> str | None:
        """The format of most multiplications that are grouped by expert; None without such."""
        return self.grouped.most_common(1)[0][0] if self.grouped else None


def adapter_facts(model: PreTrainedModel) -> dict[str, Any] | None:
    """The adapter that the model computes with, None where it has none.

    `change_norm` is the Frobenius norm over all layers of the loaded change of weights, scale B A.
    """
    facts: dict[str, Any] | None = getattr(model, ADAPTER_FACTS, None)
    return facts


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Parameters and buffers by format, the attention and expert code in use, and whether dropout can act."""
    parameter_formats: Counter[str] = Counter()
    for parameter in model.parameters():
        parameter_formats[short_name(parameter.dtype)] += parameter.numel()
    buffers = {name: short_name(buffer.dtype) for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    rotary = {form for name, form in buffers.items() if name.endswith("inv_freq")}
    config = model.config.get_text_config()
    return {
        "architecture": type(model).__name__.removeprefix("FSDP"),
        "num_parameters": sum(parameter_formats.values()),
        "parameter_dtypes": dict(parameter_formats),
        "buffer_dtypes": buffers,
        "rope_inv_freq_dtype": "/".join(sorted(rotary)) or None,
        "rope_follows_length_beyond": follows_length_beyond(model),
        "attention": config._attn_implementation,
        "sdpa_leaves_out": sdpa_leaves_out(model.config),
        "experts": getattr(config, "_experts_implementation", None),
        "config": forward_facts(config.to_dict()),
        "dropout": "on" if any(module.training for module in model.modules()) else "off",
        "device": "/".join(sorted({str(parameter.device) for parameter in model.parameters()})),
        "device_map": placement(model),
        "adapter": adapter_facts(model),
    }


def describe_arithmetic(arithmetic: Arithmetic) -> dict[str, Any]:
    """The flags while `arithmetic` is active, and the versions of the libraries."""
    with arithmetic.active():
        flags = product_flags(arithmetic.device_type)
    dtype_defined_here = arithmetic.dtype if arithmetic.defines_cpu_products else None
    return {
        **flags,
        "autocast_dtype": None if arithmetic.autocast_dtype is None else short_name(arithmetic.autocast_dtype),
        **{
            f"{dtype}_products": "accumulated in fp32 and rounded once" if dtype == dtype_defined_here else "native"
            for dtype in COARSE
        },
        "fp32_products_by_onednn": arithmetic.device_type == "cpu" and fp32_by_onednn(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


_PROBE_TOKENS: Final = 16
_ID_STRIDE: Final = 7919
_TOLERANCE_ROUNDINGS: Final = 8.0


@dataclass(frozen=True)
class ShortPass:
    """A short pass: `head_difference` is the largest of chunked and plain logits, relative to the largest logit."""

    body_formats: ProductFormats
    head_formats: ProductFormats
    head_difference: float


def short_pass(model: PreTrainedModel, head: ChunkedHead) -> ShortPass:
    """Run a few tokens in the arithmetic that is active.

    Raises:
        EngineError: logits in chunks differ from those of one pass by more than the order of summation explains.
    """
    input_ids = short_pass_ids(model, _PROBE_TOKENS)
    plain = model(input_ids=input_ids, use_cache=False).logits[0]
    with ProductFormats() as body_formats:
        states = head.body(input_ids)[0]
    with ProductFormats() as head_formats:
        chunked_logits = torch.cat([head.logits(half) for half in states.split(_PROBE_TOKENS // 2)])
    difference = _relative_difference(plain, chunked_logits)
    if difference is None or difference > _summation_tolerance(plain.dtype, states.shape[-1]):
        raise EngineError(
            f"{type(model).__name__} gives other logits in chunks than in one pass, so its log-probs cannot be "
            "trusted; use a causal language model whose forward is its base model followed by its head"
        )
    return ShortPass(body_formats, head_formats, difference)


def short_pass_ids(model: PreTrainedModel, num_tokens: int) -> torch.Tensor:
    """Token ids [1, S] from all over the vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    vocab_size: int = embeddings.weight.shape[0]
    return (torch.arange(num_tokens, device=model.device) * _ID_STRIDE % vocab_size)[None]


def _summation_tolerance(dtype: torch.dtype, width: int) -> float:
    """The largest relative difference of two sums of `width` products: kernels choose the order by shape.

    Each sum rounds once to its format and has an error of sqrt(width) roundings of the format that accumulates it, FP32
    or wider [Higham and Mary 2019, A New Approach to Probabilistic Rounding Error Analysis].
    """
    epsilon = torch.finfo(dtype).eps
    added_up = min(epsilon, torch.finfo(torch.float32).eps)
    return float(_TOLERANCE_ROUNDINGS * (epsilon + width**0.5 * added_up))


def _relative_difference(plain: torch.Tensor, chunked_logits: torch.Tensor) -> float | None:
    """The largest difference; None where the logits cannot be the same: another shape, or other finite places."""
    if plain.shape != chunked_logits.shape or not torch.equal(plain.isfinite(), chunked_logits.isfinite()):
        return None
    finite = plain.isfinite()
    if torch.equal(plain[finite], chunked_logits[finite]):
        return 0.0
    difference = (chunked_logits - plain)[finite].abs().max() / plain[finite].abs().max()
    return float(difference)


_AGREEMENT_TOKENS: Final = 200
"""The most of a sequence: no multiple of 64, so that chunked kernels pad, and logits of little memory."""
_JUDGED_TOKENS: Final = 8


def agreement_with_itself(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """How far log-probs of the same tokens are from each other in passes that must agree; None without tokens.

    The last tokens of each sequence [S] are scored in one pass, in the same pass once more (`again_nats`), in a pass
    without its last token (`shorter_nats`), and one by one behind a cache of the tokens before (`cached_nats`): median
    abs differences in nats, of which `num_tokens` decide. Where the model cannot be run with a cache, `cached_nats` is
    None and `why_not_cached` says so.
    """
    of_again, of_shorter, of_cached, why = [], [], [], None
    for sequence in sequences:
        ids_1S = torch.tensor([sequence[:_AGREEMENT_TOKENS]], device=model.device)
        num_last = min(_JUDGED_TOKENS, (ids_1S.shape[1] - 1) // 2)
        if num_last < 1:
            continue
        targets_J = ids_1S[0, -num_last:]
        whole_J, again_J = (
            _log_probs_of(_last_logits(model, ids_1S, num_last + 1).logits[0, -num_last - 1 : -1], targets_J)
            for _ in range(2)
        )
        shorter_J = _log_probs_of(_last_logits(model, ids_1S[:, :-1], num_last).logits[0, -num_last:], targets_J)
        of_again.append((whole_J - again_J).abs())
        of_shorter.append((whole_J - shorter_J).abs())
        try:
            cached_J = _log_probs_of(_logits_behind_cache(model, ids_1S[:, :-1], num_last), targets_J)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {message_of(error)}"
        else:
            of_cached.append((whole_J - cached_J).abs())
    if not of_shorter:
        return None
    return {
        "num_tokens": sum(differences.numel() for differences in of_shorter),
        "again_nats": float(torch.cat(of_again).median()),
        "shorter_nats": float(torch.cat(of_shorter).median()),
        "cached_nats": float(torch.cat(of_cached).median()) if of_cached else None,
        "why_not_cached": None if of_cached else why,
    }


def _last_logits(model: PreTrainedModel, ids_1S: torch.Tensor, num_last: int, *, use_cache: bool = False) -> Any:
    """The outputs of a pass, with logits of at least the last places: those of others cost most of a short pass."""
    can_leave_out = _LAST_LOGITS in inspect.signature(model.forward).parameters
    others = {_LAST_LOGITS: max(num_last, _FEWEST_LOGITS)} if can_leave_out else {}
    return model(input_ids=ids_1S, use_cache=use_cache, **others)


_LAST_LOGITS: Final = "logits_to_keep"
_FEWEST_LOGITS: Final = 8
"""A product of fewer rows may be another kernel's, which rounds otherwise."""


def _logits_behind_cache(model: PreTrainedModel, ids_1S: torch.Tensor, num_last: int) -> torch.Tensor:
    """Logits [J, V] at the last places, each computed alone behind the cache of the tokens before it.

    Raises:
        ValueError: the model returns no cache.
    """
    outputs = _last_logits(model, ids_1S[:, :-num_last], 1, use_cache=True)
    name = next((name for name in _CACHES if getattr(outputs, name, None) is not None), None)
    if name is None:
        raise ValueError("the model returns no cache")
    logits = []
    for place in range(ids_1S.shape[1] - num_last, ids_1S.shape[1]):
        outputs = model(input_ids=ids_1S[:, place : place + 1], use_cache=True, **{name: getattr(outputs, name)})
        logits.append(outputs.logits[0])
    return torch.cat(logits)


_CACHES: Final = ("past_key_values", "cache_params")


def _log_probs_of(logits_JV: torch.Tensor, targets_J: torch.Tensor) -> torch.Tensor:
    log_probs_JV = logits_JV.log_softmax(-1, dtype=torch.float64)
    return log_probs_JV.gather(1, targets_J[:, None])[:, 0]
