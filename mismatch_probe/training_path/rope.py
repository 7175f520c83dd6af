"""Rotary positions whose frequencies follow the length of what is computed, and what keeps them from a sequence's past.

transformers' `dynamic` frequencies grow with the longest sequence so far and shrink again behind one that is shorter
than the model was trained for: between the two, log-probs would depend on what was computed before. Those of `longrope`
follow each forward alone. In a padded batch both follow its longest row.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedModel

_DYNAMIC: Final = "dynamic"
_LONG: Final = "longrope"


def forget_lengths(model: PreTrainedModel) -> None:
    """Have every forward begin with the frequencies that the model was trained with, so that no earlier one matters."""
    for module in model.modules():
        if any(_DYNAMIC in kind for kind, _, _ in _kinds(module)):
            module.register_forward_pre_hook(_forget)


def follows_length_beyond(model: PreTrainedModel) -> int | None:
    """Tokens beyond which the frequencies follow the longest sequence of a forward; None where they never do."""
    limits = []
    for kind, _, parameters in (found for module in model.modules() for found in _kinds(module)):
        if _DYNAMIC in kind:
            limits.append(int(model.config.get_text_config().max_position_embeddings))
        elif kind == _LONG:
            limits.append(int(parameters["original_max_position_embeddings"]))
    return min(limits, default=None)


def _forget(module: Any, args: tuple[Any, ...]) -> None:
    """A function of no owner, since a copy of the model would copy that too."""
    for kind, prefix, _ in _kinds(module):
        if _DYNAMIC in kind:
            held, trained = (getattr(module, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
            module.register_buffer(f"{prefix}inv_freq", trained.to(held.device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _kinds(module: torch.nn.Module) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The kind of each set of frequencies that a rotary module has, the beginning of its names, and its parameters."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None:
        return
    parameters: Any = getattr(module.config, "rope_parameters", None) or {}
    if isinstance(kinds, str):
        yield kinds, "", parameters
        return
    for layer_type, kind in kinds.items():
        yield kind, f"{layer_type}_", parameters.get(layer_type) or {}
