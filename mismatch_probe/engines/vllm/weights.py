"""New weights for a running engine, in place."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from mismatch_probe.errors import EngineError


def send_weights(llm: Any, weights: Iterable[tuple[str, torch.Tensor]], *, in_process: bool) -> None:
    """Load `weights`, named as in the checkpoint, into `llm` and drop what its caches hold of the old ones.

    Workers of this process take the tensors themselves; those of other processes read them from a temporary folder.
    """
    if in_process:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    else:
        with TemporaryDirectory(prefix="mismatch-probe-weights-") as folder:
            tensors = {name: tensor.contiguous() for name, tensor in weights}
            save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.collective_rpc("probe_repack")
    forget_prefixes(llm)


def forget_prefixes(llm: Any) -> None:
    """Empty the prefix cache.

    Raises:
        EngineError: vLLM did not.
    """
    if not llm.reset_prefix_cache():
        raise EngineError("vLLM kept its prefix cache, so it would go on with what other weights computed")


def require_forgotten(outputs: Sequence[Any]) -> None:
    """Look whether `forget_prefixes` did: of a batch after it, the request that comes first finds nothing in the cache.

    A request further back may share what those before it computed.

    Raises:
        EngineError: it found something.
    """
    num_cached = (outputs[0].num_cached_tokens or 0) if outputs else 0
    if num_cached:
        raise EngineError(
            f"vLLM says that it emptied its prefix cache, and the first request after that took {num_cached} tokens "
            "from it, which other weights may have computed; set engine.prefix_caching = false"
        )
