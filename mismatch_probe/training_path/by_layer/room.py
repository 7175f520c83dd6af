"""What fits in memory: a whole reference, two of its layers at once, the hidden states of all responses."""

from math import prod
from pathlib import Path
from typing import Final

import torch

from mismatch_probe.config.model import HIDDEN_SHARE, WEIGHTS_SHARE, ReferenceSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_size
from mismatch_probe.provenance.checkpoint import safetensors_header, weight_files
from mismatch_probe.provenance.quantization import stored_quantization
from mismatch_probe.training_path.by_layer.free_memory import free_memory
from mismatch_probe.training_path.loading import choose_device

_HOST: Final = torch.device("cpu")


def why_by_layer(
    folder: Path, dtype: Dtype, training: TrainingPathSettings, reference: ReferenceSettings
) -> str | None:
    """Why the reference in `dtype` is computed layer by layer; None where it is loaded whole.

    Where nothing is asked it is so if its weights do not fit the memory that is free; where it then cannot be (an
    adapter, a device map, quantised weights), it is loaded whole and fails if it must.

    Raises:
        UsageError: the files cannot be read, or there is no such device.
    """
    if reference.by_layer:
        return "reference.by_layer asks for it"
    if training.adapter is not None or training.device_map is not None or stored_quantization(folder) is not None:
        return None
    device = choose_device(training.device)
    needed, free = weight_bytes(folder, dtype), free_memory(device)
    if not reference.holds_one_layer(needed, free):
        return None
    return f"its weights in {dtype} take {write_size(needed)}, and {write_size(free)} are free ({device})"


def weight_bytes(folder: Path, dtype: Dtype) -> int:
    """Of all that the files hold, in the format that it is computed in."""
    headers = [safetensors_header(path) for path in weight_files(folder)]
    parameters: int = sum(prod(entry["shape"]) for header in headers for entry in header.values())
    return parameters * dtype.num_bytes


def fits_two_layers(device: torch.device, outside_bytes: int, largest_bytes: int) -> bool:
    """Whether a layer can be read while another computes."""
    return outside_bytes + 2 * largest_bytes <= WEIGHTS_SHARE * free_memory(device)


def fit_in_memory(hidden_bytes: int) -> bool:
    """Whether the hidden states of so many bytes are kept on the host, or else on disk."""
    return hidden_bytes <= HIDDEN_SHARE * free_memory(_HOST)
