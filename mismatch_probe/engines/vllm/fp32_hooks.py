"""Inside each vLLM worker: the head's or the router's logits in FP32, from 16-bit weights and what it is given."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import linear

from mismatch_probe.records.sequences import is_router

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

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
