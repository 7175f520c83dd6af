# ruff: noqa: N806 - shape suffixes
"""The experts that a running vLLM chooses for given tokens."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mismatch_probe.engines.vllm.hooks import TOKENS_FILE
from mismatch_probe.engines.vllm.recorded import rows_of_steps
from mismatch_probe.engines.vllm.routing_hooks import CHOICES_FILE
from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.records.activations import ActivationBatch
from mismatch_probe.records.routing import SequenceRouting, by_sequence
from mismatch_probe.records.sequences import TokenSequence


@contextmanager
def recorded_routing(llm: Any, sequences: Sequence[TokenSequence]) -> Iterator[list[SequenceRouting]]:
    """What every router chooses for the sequences while they are replayed inside; filled at the end, in their order.

    Raises:
        RoutingUnseen: the model has no router that could be read.
        EngineError: vLLM did not compute every token, or others too.
    """
    recorded: list[SequenceRouting] = []
    with tempfile.TemporaryDirectory(prefix="mismatch-probe-routing-") as folder:
        llm.collective_rpc("probe_record_routing", args=(folder,))
        try:
            yield recorded
        finally:
            llm.collective_rpc("probe_record_routing_stop")
        layers, experts_LTK, weights_LTK = _gathered(Path(folder), ActivationBatch(0, 0, list(sequences), []))
    recorded += by_sequence(sequences, layers, experts_LTK.numpy(), weights_LTK.numpy())


def _gathered(folder: Path, batch: ActivationBatch) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The layers that have experts, and every step's choices in the order of the tokens asked for."""
    steps = sorted(folder.iterdir())
    tokens = [load_file(step / TOKENS_FILE) for step in steps]
    targets = rows_of_steps([(step["input_ids"], step["positions"]) for step in tokens], batch)
    chosen = [load_file(step / CHOICES_FILE) for step in steps]
    layers = tuple(sorted(int(name.removeprefix("experts.")) for name in chosen[0] if name.startswith("experts.")))
    if not layers:
        raise RoutingUnseen(
            "no router of this engine hands its choice to the experts, as in a dense model or where one kernel does "
            "both, so what it chooses cannot be read"
        )
    num_tokens, num_chosen = sum(batch.rows_per_sequence), chosen[0][f"experts.{layers[0]}"].shape[1]
    experts_LTK = torch.full((len(layers), num_tokens, num_chosen), -1, dtype=torch.int32)
    weights_LTK = torch.zeros(len(layers), num_tokens, num_chosen)
    for step, target_T in zip(chosen, targets, strict=True):
        kept_T = target_T >= 0
        for index, layer in enumerate(layers):
            experts_LTK[index, target_T[kept_T]] = step[f"experts.{layer}"][: len(kept_T)][kept_T]
            weights_LTK[index, target_T[kept_T]] = step[f"weights.{layer}"][: len(kept_T)][kept_T]
    return layers, experts_LTK, weights_LTK
