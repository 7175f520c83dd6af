"""The faults that are planted, and how each is planted into a model of transformers and into a running vLLM."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mismatch_probe.engines.vllm.worker_weights import exact_logits

LINEARS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS: Final = ("input_layernorm", "post_attention_layernorm")
ROTARY: Final = "self_attn.rotary_emb"


@dataclass(frozen=True)
class Fault:
    """One fault; `layer` is None where it is in all layers or outside them."""

    kind: str
    place: str
    layer: int | None
    strength: float
    seed: int
    label: str


_LABELS: Final = {
    "weight": "one matrix of a layer, each weight off by {:.1%}",
    "layer": "every matrix of a layer, each weight off by {:.1%}",
    "epsilon": "a norm's epsilon that shortens its output by {:.2%}",
    "epsilons": "every norm's epsilon {:g} for 1e-6",
    "rope": "RoPE base times about {:g}",
    "row": "one row of lm_head off by {:.0%}",
    "router": "a router in FP32 on one side",
}


def draw(kind: str, strength: float, seed: int, *, num_layers: int, moe: bool, vocab_size: int) -> Fault:
    """A fault at a random place; RoPE's base, which has one place, is random itself."""
    random = np.random.default_rng([seed, sum(map(ord, kind))])
    layer: int | None = int(random.integers(num_layers))
    label = _LABELS[kind].format(strength)
    match kind:
        case "weight":
            place = str(random.choice([*LINEARS, *(() if moe else DENSE)]))
        case "epsilon":
            place = str(random.choice(NORMS))
        case "row":
            place, layer = f"lm_head:{random.integers(vocab_size)}", None
        case "rope":
            place, layer, strength = ROTARY, None, strength ** float(random.uniform(0.8, 1.2))
        case "epsilons":
            place, layer = "norm", None
        case _:
            place = {"layer": "", "router": "mlp.gate"}[kind]
    return Fault(kind, place, layer, strength, seed, label)


def changed_weights(fault: Fault, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors that the fault changes, in BF16 values."""
    generator = torch.Generator().manual_seed(fault.seed)
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    modules = {}
    for name, weight in weights.items():
        if fault.kind == "row" and name == head:
            row = int(fault.place.partition(":")[2])
            modules[name] = weight.clone()
            modules[name][row] = _off(weight[row], fault.strength, generator)
        in_layer = name.startswith(f"model.layers.{fault.layer}.") and weight.dim() > 1
        if in_layer and (fault.kind == "layer" or (fault.kind == "weight" and f".{fault.place}." in name)):
            modules[name] = _off(weight, fault.strength, generator)
    return modules


def _off(weight: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    return (weight.float() * (1 + strength * noise)).bfloat16().to(weight.dtype)


@contextmanager
def in_transformers(fault: Fault, model: Any, weights: dict[str, Tensor], mean_square: float) -> Iterator[None]:
    """Plant the fault into a model of transformers and take it out again; `mean_square` is of the norm's input.

    Experts, which transformers holds in one tensor and under other names than the checkpoint, stay as they are.
    """
    state = dict(model.named_parameters())
    rotary = model.model.rotary_emb
    norms = _norms(fault, model)
    gates = [] if fault.kind != "router" else [model.model.layers[fault.layer].mlp.gate]
    changed = {name: weight for name, weight in changed_weights(fault, weights).items() if name in state}
    kept = {name: state[name].data.clone() for name in changed}
    epsilons = {norm: getattr(norm, _epsilon_name(norm)) for norm in norms}
    frequencies = {name: buffer.clone() for name, buffer in rotary.named_buffers() if "original" not in name}
    try:
        with torch.no_grad():
            for name, weight in changed.items():
                state[name].data.copy_(weight)
        for norm, epsilon in epsilons.items():
            setattr(norm, _epsilon_name(norm), _epsilon(fault, epsilon, mean_square))
        if fault.kind == "rope":
            for name, inverse in frequencies.items():
                rotary.get_buffer(name).copy_(_frequencies(inverse, fault.strength))
        handles = [gate.register_forward_pre_hook(_to_fp32) for gate in gates]
        for gate in gates:
            gate.weight.data = gate.weight.data.float()
        yield
    finally:
        for name, weight in kept.items():
            state[name].data.copy_(weight)
        _reset(epsilons)
        for name, inverse in frequencies.items():
            rotary.get_buffer(name).copy_(inverse)
        for handle in handles:
            handle.remove()
        for gate in gates:
            gate.weight.data = gate.weight.data.bfloat16()


def _norms(fault: Fault, model: Any) -> list[Any]:
    if fault.kind == "epsilons":
        return [module for module in model.modules() if hasattr(module, _epsilon_name(module))]
    return [model.model.layers[fault.layer].get_submodule(fault.place)] if fault.kind == "epsilon" else []


def _epsilon_name(norm: Any) -> str:
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


def _epsilon(fault: Fault, epsilon: float, mean_square: float) -> float:
    """(x^2 + eps)^(-1/2) is shorter than it should be by eps / (2 x^2)."""
    return fault.strength if fault.kind == "epsilons" else epsilon + 2 * fault.strength * mean_square


def _reset(epsilons: Mapping[Any, float]) -> None:
    for norm, epsilon in epsilons.items():
        setattr(norm, _epsilon_name(norm), epsilon)


def _to_fp32(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(arg.float() for arg in args)


def _frequencies(inverse: Tensor, times: float) -> Tensor:
    """theta^(-2i/d) for `times` the base."""
    exponents = torch.arange(len(inverse)) / len(inverse)
    return inverse * times**-exponents


@contextmanager
def in_vllm(fault: Fault, engine: Any, weights: dict[str, Tensor], mean_square: float) -> Iterator[None]:
    """Plant the fault into a running engine and take it out again; `mean_square` is of the norm's input."""
    changed = changed_weights(fault, weights)
    undo: list[Callable[[], Any]] = []
    try:
        if changed:
            engine.update_weights({**weights, **changed}.items())
            undo.append(lambda: engine.update_weights(weights.items()))
        else:
            engine.llm.apply_model(lambda model: undo.append(_change_vllm(fault, model, mean_square)))
        yield
    finally:
        for item in undo:
            item()


def _change_vllm(fault: Fault, model: Any, mean_square: float) -> Callable[[], Any]:
    layers = model.model.layers
    if norms := _norms(fault, model):
        epsilons = {norm: getattr(norm, _epsilon_name(norm)) for norm in norms}
        for norm, epsilon in epsilons.items():
            setattr(norm, _epsilon_name(norm), _epsilon(fault, epsilon, mean_square))
        return partial(_reset, epsilons)
    if fault.kind == "router":
        layer = layers[fault.layer]
        router = (layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe).gate
        remove: Callable[[], Any] = router.register_forward_hook(exact_logits(router)).remove
        return remove
    caches: dict[Any, Tensor] = {}
    for rotary in {layer.self_attn.rotary_emb for layer in layers}:
        caches[rotary] = rotary.cos_sin_cache.clone()
        base = rotary.base
        rotary.base = base * fault.strength
        rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache().to(caches[rotary].dtype))
        rotary.base = base
    return partial(_restore, caches)


def _restore(caches: Mapping[Any, Tensor]) -> None:
    for rotary, cache in caches.items():
        rotary.cos_sin_cache.copy_(cache)
