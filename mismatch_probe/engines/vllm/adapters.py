# ruff: noqa: N806 - shape suffixes
"""A LoRA adapter that vLLM serves: what it is started with, and what the workers then hold of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

import torch

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mismatch_probe.provenance.adapter import Adapter

_NUMBER: Final = 1
_SLOT: Final = 0


def adapter_arguments(adapter: Adapter | None, dtype: Dtype, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine that serves `adapter` alone; imports vLLM.

    Only what is adapted gets room for it: with an adapter's room in its head vLLM cannot score a prompt's tokens.

    Raises:
        UsageError: its rank is larger than any that vLLM serves, or it is to be served in FP32 on a GPU.
    """
    if adapter is None:
        return {}
    if dtype == Dtype.FP32 and not on_cpu:
        raise UsageError(
            f"vLLM serves adapters on a GPU in 16 bit alone, and {adapter.folder} is to be served in fp32; leave "
            "--dtype fp32 out, or merge it into a checkpoint and compare that"
        )
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    if adapter.rank > max(ranks):
        raise UsageError(
            f"the adapter {adapter.folder} has rank {adapter.rank}, and vLLM serves up to {max(ranks)}; merge it into "
            "a checkpoint and compare that"
        )
    fitting = min(rank for rank in ranks if rank >= adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting, "lora_target_modules": adapter.names}


def serve_adapter(llm: Any, adapter: Adapter) -> Any:
    """Load `adapter` into the engine; what requests have to name to be computed with it.

    Raises:
        UsageError: vLLM does not serve it on this model.
    """
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", _NUMBER, str(adapter.folder))
    try:
        llm.llm_engine.add_lora(request)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"vLLM does not serve the adapter {adapter.folder} ({reason.rstrip('.')}); give engine.adapter one of this "
            "checkpoint, or merge it into the checkpoint"
        ) from error
    return request


def served_facts(llm: Any, adapter: Adapter) -> dict[str, Any]:
    """What a record keeps of a served adapter, with what the workers hold of it.

    `change_norm` is the Frobenius norm over all layers of what it adds to the weights; None where several workers have
    a part each.

    Raises:
        EngineError: vLLM left layers of it out.
    """
    workers: list[dict[str, Any]] = llm.collective_rpc("probe_adapter")
    held = workers[0]
    if held["num_modules"] < len(adapter.modules):
        raise EngineError(
            f"vLLM applies {held['num_modules']} of the {len(adapter.modules)} layers of the adapter {adapter.folder}; "
            "merge it into a checkpoint and compare that"
        )
    if len(workers) > 1:
        held["change_norm"] = None
    return {**adapter.facts(), "merged": False, **held}


class ServedAdapter:
    """Methods vLLM mixes into its worker class through `ProbeWorker`."""

    get_model: Callable[[], Any]

    @torch.no_grad()
    def probe_adapter(self) -> dict[str, Any]:
        """Layers that have matrices of the adapter, and the Frobenius norm over all of them of scale B A."""
        squares, modules = 0.0, 0
        for a_RK, b_NR in self._probe_matrices():
            squares += float(((b_NR.T @ b_NR) * (a_RK @ a_RK.T)).sum())
            modules += bool(a_RK.any())
        return {"num_modules": modules, "change_norm": squares**0.5}

    def _probe_matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """B holds the scale; a fused layer has a pair for each part."""
        for module in self.get_model().modules():
            for a_stacked, b_stacked in zip(
                _parts(module, "lora_a_stacked"), _parts(module, "lora_b_stacked"), strict=True
            ):
                yield a_stacked[_SLOT, 0].double(), b_stacked[_SLOT, 0].double()


def _parts(module: torch.nn.Module, name: str) -> tuple[torch.Tensor, ...]:
    stacked = getattr(module, name, ())
    return (stacked,) if isinstance(stacked, torch.Tensor) else tuple(stacked)
