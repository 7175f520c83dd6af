"""Where a device map really put a model's modules, and whether that was asked for."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import Offload
from mismatch_probe.errors import UsageError

_ALLOWED: Final[dict[Offload | None, frozenset[str]]] = {
    None: frozenset(),
    "cpu": frozenset({"cpu"}),
    "disk": frozenset({"cpu", "disk"}),
}


def placement(model: PreTrainedModel) -> dict[str, str] | None:
    """The device of each module as accelerate chose it; None where the whole model is on one."""
    chosen: dict[str, Any] | None = getattr(model, "hf_device_map", None)
    return None if chosen is None else {name: str(_device(place)) for name, place in chosen.items()}


def _device(place: Any) -> Any:
    """accelerate writes a GPU as its number."""
    return torch.device("cuda", place) if isinstance(place, int) else place


def require_as_asked(
    folder: Path, model: PreTrainedModel, device: torch.device, offload: Offload | None, *, instead: str | None = None
) -> None:
    """
    instead: what is advised of a model that is never offloaded, the reference; None of one that may be.

    Raises:
        UsageError: modules stand on the CPU or on disk, and neither `device` nor `offload` asks for that.
    """
    offload = None if instead else offload
    allowed = _ALLOWED[offload] | {device.type}
    counts = Counter((placement(model) or {}).values())
    elsewhere = {place: count for place, count in counts.items() if place in ("cpu", "disk") and place not in allowed}
    if elsewhere:
        where = " and ".join(
            f"{count} on {'the CPU' if place == 'cpu' else place}" for place, count in elsewhere.items()
        )
        asked = f'ask for it with training.offload = "{"disk" if "disk" in elsewhere else "cpu"}"'
        raise UsageError(
            f"training.device_map put modules of {folder} where no GPU computes ({where} of {counts.total()}), which "
            f"is slow; give more or larger GPUs, or {instead or asked}"
        )
