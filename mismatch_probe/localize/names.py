"""Where a person finds a place in each implementation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_probe.records.sequences import BLOCK, HEAD, ROTARY_KEYS, ROTARY_QUERIES

_ROTARY = "self_attn.rotary_emb"
_NOT_HELD_AGAINST = ("rotary", ".experts")
"""Parts of what is seen as a whole."""


@dataclass(frozen=True)
class Names:
    """`train_layers` and `infer_layers` are the paths of the decoder layers, `inside` vLLM's names by place."""

    train_layers: Sequence[str]
    infer_layers: Sequence[str]
    inside: Mapping[str, str]

    @classmethod
    def of(cls, train: Mapping[str, Any], infer: Mapping[str, Any]) -> "Names":
        return cls(train["layer_paths"], infer["layer_paths"], infer["names"])

    def train(self, layer: int | None, place: str) -> str:
        return _name(self.train_layers, layer, place)

    def infer(self, layer: int | None, place: str) -> str | None:
        """None where vLLM has no module of its own for it."""
        if layer is None or place == BLOCK:
            return _name(self.infer_layers, layer, place)
        inside = self.inside.get(_ROTARY if place in (ROTARY_QUERIES, ROTARY_KEYS) else place)
        return None if inside is None else _name(self.infer_layers, layer, inside)

    def unmatched(self, places: set[str]) -> list[str]:
        """Modules of vLLM's layers that no place of the training path was held against."""
        return sorted(
            name
            for place, name in self.inside.items()
            if place not in places and not any(part in place for part in _NOT_HELD_AGAINST)
        )


def _name(layers: Sequence[str], layer: int | None, place: str) -> str:
    if layer is None:
        return place if place == HEAD else layers[0].rpartition("layers.")[0] + place
    return layers[layer] if place == BLOCK else f"{layers[layer]}.{place}"
