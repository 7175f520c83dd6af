"""Inside each vLLM worker: its weights as digests, and the head's or the router's logits in FP32.

What vLLM's CPU build keeps packed of weights, packed again after others were loaded in their place.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import linear

from mismatch_probe.engines.weight_digests import as_numbers, weight_digest
from mismatch_probe.records.activations import is_router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


_EXPERTS: Final = ".experts."
_PACKED: Final = " (packed)"
_ROWS_AT_A_TIME: Final = 512


class HeldWeights:
    """Methods of a worker that says what it holds."""

    get_model: Any

    def probe_held_weights(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Of each weight `digest`, `num_elements` and `made_of`, out of the checkpoint's `names`.

        A mixture's experts are one weight. What a CPU keeps packed is read back as it is multiplied with.
        """
        model = self.get_model()
        made_of = _made_of(model, names)
        digests: dict[str, list[torch.Tensor]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        with torch.inference_mode():
            for name, tensor in _weights(model):
                digests[name].append(weight_digest(tensor))
                sizes[name] += tensor.numel()
        totals = as_numbers([torch.stack(parts).sum() for parts in digests.values()])
        return {
            name: {"digest": total, "num_elements": sizes[name], "made_of": made_of.get(name.removesuffix(_PACKED), {})}
            for name, total in zip(digests, totals, strict=True)
        }


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, and what a linear layer multiplies with where that is a packed copy; a piece at a time."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            yield _group(name), parameter
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear") and module.weight.dim() <= 2 and _has_packed_copy(module):
            for rows in _read_back(module):
                yield f"{name}.weight{_PACKED}", rows


def _has_packed_copy(module: Any) -> bool:
    """Whether a layer's product leaves the weight that it is handed aside; a CPU without AVX-512 packs none in BF16."""
    if not module.weight.numel():
        return True
    input_row = module.weight.new_zeros(1, module.weight.shape[1])
    no_number = module.weight.new_full((), torch.nan).expand_as(module.weight)
    return not bool(module.cpu_linear(input_row, no_number, None).isnan().all())


def _read_back(module: Any) -> Iterator[torch.Tensor]:
    """The products with unit vectors, exact in every format: columns of a layer's matrix, some at a time."""
    width = next(
        getattr(module, name)
        for name in ("input_size_per_partition", "input_size", "embedding_dim")
        if hasattr(module, name)
    )
    for start in range(0, width, _ROWS_AT_A_TIME):
        rows = min(_ROWS_AT_A_TIME, width - start)
        units = torch.zeros(rows, width, dtype=module.weight.dtype)
        units[torch.arange(rows), torch.arange(start, start + rows)] = 1
        yield module.quant_method.apply(module, units, bias=None)


def _made_of(model: torch.nn.Module, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """The checkpoint's tensors in each weight, by vLLM's own tables of what it renames and stacks."""
    own = {_group(name) for name, _ in model.named_parameters()}
    copies = {
        f"{name}.weight": int(getattr(module, "num_kv_head_replicas", 1)) for name, module in model.named_modules()
    }
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    packing: Any = getattr(model, "packed_modules_mapping", {})
    stacked_in = {part: stack for stack, parts in packing.items() for part in parts}
    made_of: dict[str, dict[str, int]] = defaultdict(dict)
    for name in names:
        vllm_names = [name] if mapper is None else mapper.apply_list([name])
        if not vllm_names:
            continue
        vllm_name = vllm_names[0]
        places = (vllm_name, ".".join(stacked_in.get(word, word) for word in vllm_name.split(".")))
        place = next((_group(place) for place in places if _group(place) in own), None)
        if place is not None:
            is_query = ".q_proj." in name or place not in copies
            made_of[place][name] = 1 if is_query else copies[place]
    first_names = {id(parameter): _group(name) for name, parameter in model.named_parameters()}
    ties = {
        f"{name}.weight": first_names.get(id(getattr(module, "weight", None))) for name, module in model.named_modules()
    }
    return {**{name: made_of[first] for name, first in ties.items() if first in made_of}, **made_of}


def _group(name: str) -> str:
    """A weight's own name, or that of the experts it belongs to."""
    prefix, experts, _ = name.partition(_EXPERTS)
    return prefix + experts.rstrip(".") if experts else name


def pack_again(model: torch.nn.Module) -> None:
    """Pack for a CPU what a reload leaves out, from what the weights are now.

    An output projection that shares the embedding's weight is passed over, since no weight is named after it, and
    goes on multiplying with the old copy. Experts keep the checkpoint's layout, which their kernel misreads.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules: list[Any] = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, VocabParallelEmbedding)]
    for module in embeddings:
        shares = any(other is not module and other.weight is module.weight for other in embeddings)
        if isinstance(module, ParallelLMHead) and shares:
            module.quant_method.process_weights_after_loading(module)
    for module in modules:
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


LM_HEAD: Final = "lm_head"
ROUTER: Final = "router"


class Fp32Hooks:
    """Methods vLLM mixes into its worker class through `ProbeWorker`."""

    get_model: Callable[[], Any]

    def probe_num_routers(self) -> int:
        return len(self._probe_routers())

    def probe_raise(self, part: str) -> None:
        self.probe_undo: list[Callable[[], Any]] = []
        if part == ROUTER:
            for router in self._probe_routers():
                self.probe_undo.append(router.register_forward_hook(exact_logits(router)).remove)
            return
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.get_model().modules():
            if isinstance(module, VocabParallelEmbedding):
                method: Any = module.quant_method
                method.apply = _exact_product
                self.probe_undo.append(partial(method.__dict__.pop, "apply", None))

    def probe_lower(self) -> None:
        for undo in self.probe_undo:
            undo()

    def _probe_routers(self) -> list[torch.nn.Module]:
        return [module for path, module in self.get_model().named_modules() if ".layers." in path and is_router(path)]


def _exact_product(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x.float(), layer.weight.float(), None if bias is None else bias.float())


def exact_logits(router: Any) -> Callable[[Any, tuple[Tensor, ...], Any], Any]:
    """A forward hook that gives the router's logits in FP32.

    A CPU keeps a linear layer's weights packed and nothing else. What it makes of the unit vectors is the weights,
    exactly where there is no bias: one product each, and zeros.
    """
    parameter = next(router.parameters())
    bias = router(parameter.new_zeros(1, router.input_size))
    weight = router(torch.eye(router.input_size, dtype=parameter.dtype, device=parameter.device))
    bias, weight = (_logits(output).float() for output in (bias, weight))

    def exact(_: Any, args: tuple[Tensor, ...], output: Any) -> Any:
        logits = args[0].float() @ (weight - bias) + bias
        return (logits, *output[1:]) if isinstance(output, tuple) else logits

    return exact


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits
