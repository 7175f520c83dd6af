"""What runs inside each vLLM worker, called by name through `collective_rpc`: no function is pickled.

At each chunk of a prompt but the last, vLLM's V1 runner samples a token, throws it away and rewinds the request's
seeded generator through the Philox offset, which only CUDA's generators have: on a CPU it raises "CPU Generator does
not use offset". Here a spare generator draws the token that is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np
import torch

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.hooks import ActivationHooks, RoutingHooks
from mismatch_probe.engines.vllm.worker_weights import Fp32Hooks, HeldWeights, pack_again
from mismatch_probe.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mismatch_probe.provenance.stored_tensors import Adapter


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
    report = workers[0]
    if report["num_modules"] < len(adapter.modules):
        raise EngineError(
            f"vLLM applies {report['num_modules']} of the {len(adapter.modules)} layers of the adapter "
            f"{adapter.folder}; merge it into a checkpoint and compare that"
        )
    if len(workers) > 1:
        report["change_norm"] = None
    return {**adapter.facts(), "merged": False, **report}


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
    parts = getattr(module, name, ())
    return (parts,) if isinstance(parts, torch.Tensor) else tuple(parts)


class _SpareGenerator(torch.Generator):
    """Draws for one step; when it is rewound, it hands the request's own generator back, undrawn."""

    hand_back: Callable[[], None]

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        self.hand_back()
        return self


def spare_discarded_draws(runner: Any) -> None:
    """Make the V1 model runner `runner` draw tokens it discards from spare generators."""
    sample = runner._sample

    def sample_sparing_generators(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        is_discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        for index in np.flatnonzero(is_discarded).tolist():
            if index in generators:
                spare = _SpareGenerator(device="cpu")
                spare.hand_back = partial(generators.__setitem__, index, generators[index])
                generators[index] = spare
        return sample(*args, **kwargs)

    runner._sample = sample_sparing_generators


def compute_eagerly(runner: Any) -> None:
    """Make the model runner `runner` compile nothing: not how ranks are counted, not how a shared vocabulary is read.

    vLLM compiles single functions in eager engines too. They compute with integers and masks, so compiled or not they
    give the same; compiling one costs each process on a CPU 2 to 4 s of processor.
    """
    for name in ("execute_model", "sample_tokens"):
        setattr(runner, name, torch.compiler.set_stance("force_eager")(getattr(runner, name)))


WORKER_EXTENSION: Final = f"{__name__}.ProbeWorker"


class ProbeWorker(ActivationHooks, Fp32Hooks, HeldWeights, RoutingHooks, ServedAdapter):
    """Methods vLLM mixes into its worker class (`worker_extension_cls`), whose attributes are declared here."""

    model_runner: Any
    vllm_config: Any
    device: Any
    use_v2_model_runner: bool

    def probe_prepare(self) -> None:
        """What a worker needs before its first request."""
        if torch.device(self.device).type == "cpu" and not self.use_v2_model_runner:
            spare_discarded_draws(self.model_runner)
            if self.vllm_config.model_config.enforce_eager:
                compute_eagerly(self.model_runner)

    def probe_scale_logits(self, temperature: float) -> None:
        """Divide every logit by `temperature` before anything reads it; 1 restores the model.

        vLLM's prompt log-probs carry no temperature. Decoding converts logits to FP32, then divides; so does this.
        """
        model = self.get_model()
        vars(model).pop("compute_logits", None)
        if temperature == 1.0:
            return
        compute_logits = model.compute_logits

        def scaled_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute_logits(*args, **kwargs)
            if logits is None:
                return None
            return logits.to(torch.float32) / torch.full((1,), temperature, dtype=torch.float32, device=logits.device)

        model.compute_logits = scaled_logits

    def probe_image_attention(self) -> str | None:
        """Whether the tokens of an image see each other `both ways`, where the architecture asks for that and the
        back end can; else `causal`. None of a version whose layers do not say.
        """
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        layers = [layer for layer in layers if hasattr(layer, "use_mm_prefix")]
        if not layers:
            return None
        backends = [layer.get_attn_backend() for layer in layers if layer.use_mm_prefix]
        return "both ways" if backends and all(backend.supports_mm_prefix() for backend in backends) else "causal"

    def probe_repack(self) -> None:
        """Pack again for a CPU what `reload_weights` leaves out."""
        if torch.device(self.device).type == "cpu":
            pack_again(self.get_model())

    def probe_describe(self) -> dict[str, Any]:
        """What this worker really holds and runs, as plain values."""
        model = self.get_model()
        config = self.vllm_config
        runner = self.model_runner
        layers = list(config.compilation_config.static_forward_context.values())
        recurrent_layers = [layer for layer in layers if hasattr(layer, "get_state_dtype")]
        caches = [layer.kv_cache for layer in layers if layer not in recurrent_layers and hasattr(layer, "kv_cache")]
        backends = Counter(
            layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")
        )
        device = torch.device(self.device)
        return {
            "model_class": type(model).__name__,
            "weight_methods": _weight_methods(model),
            "parameter_dtypes": dict(Counter(_name(parameter.dtype) for parameter in model.parameters())),
            "lm_head_weight_dtype": _lm_head_dtype(model),
            "attention_backends": dict(backends),
            "kv_cache_dtypes": sorted(
                {_name(tensor.dtype) for tensor in _tensors(caches if recurrent_layers else runner.kv_caches)}
            ),
            "state_dtypes": sorted({_name(dtype) for layer in recurrent_layers for dtype in _state_dtypes(layer)}),
            "model_runner": "v2" if self.use_v2_model_runner else "v1",
            "model_runner_class": f"{type(runner).__module__}.{type(runner).__name__}",
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "num_threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from _tensors(branch)


def _state_dtypes(layer: Any) -> tuple[torch.dtype, ...]:
    """The format of a recurrent layer's state; of the window of a convolution, which holds its inputs, none."""
    dtypes: tuple[torch.dtype, ...] = layer.get_state_dtype()
    return () if "short_conv" in str(layer.mamba_type).lower() else dtypes[-1:]


def _weight_methods(model: torch.nn.Module) -> dict[str, int]:
    """How the layers' weights are held and multiplied, by vLLM's own names: whether quantisation reached them."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import LinearMethodBase

    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return dict(
        Counter(
            type(method).__name__ for method in methods if isinstance(method, LinearMethodBase | FusedMoEMethodBase)
        )
    )


def _lm_head_dtype(model: torch.nn.Module) -> str | None:
    """Dtype of the output projection's weight; tied models project with the embedding."""
    for name in ("lm_head", "embed_tokens"):
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if path.rpartition(".")[2] == name and isinstance(weight, torch.Tensor):
                return _name(weight.dtype)
    return None
