"""What vLLM's CPU build keeps packed of weights, packed again after others were loaded in their place."""

from typing import Any

import torch


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
