"""New weights for a running engine, in place."""

from collections.abc import Iterable
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
