# ruff: noqa: N806 - shape suffixes
"""The experts that a running vLLM chooses for given tokens."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mismatch_probe.engines.vllm.engine import VllmEngine
from mismatch_probe.engines.vllm.hooks import TOKENS_FILE
from mismatch_probe.engines.vllm.recorded import rows_of_steps
from mismatch_probe.engines.vllm.routing_hooks import CHOICES_FILE
from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import ActivationBatch
from mismatch_probe.records.routing import SequenceRouting, by_sequence
from mismatch_probe.records.sequences import TokenSequence


def record_routing(engine: VllmEngine, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
    """Replay the sequences and keep what every router chose, for each of them in order.

    Raises:
        EngineError: the engine is compiled, has several workers, or no router that could be read.
    """
    settings = engine.effective_settings()
    if settings["num_workers"] != 1 or not settings["enforce_eager"]:
        raise EngineError(
            "experts are read inside one vLLM worker that runs eagerly; give --vllm.enforce_eager true, and leave "
            "--vllm.tensor_parallel_size and its like at 1"
        )
    batch = ActivationBatch(0, 0, list(sequences), [])
    with tempfile.TemporaryDirectory(prefix="mismatch-probe-routing-") as folder:
        engine.llm.collective_rpc("probe_record_routing", args=(folder,))
        try:
            engine.replay(sequences)
        finally:
            engine.llm.collective_rpc("probe_record_routing_stop")
        layers, experts_LTK, weights_LTK = _gathered(Path(folder), batch)
    return by_sequence(sequences, layers, experts_LTK.numpy(), weights_LTK.numpy())


def _gathered(folder: Path, batch: ActivationBatch) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The layers that have experts, and every step's choices in the order of the tokens asked for."""
    steps = sorted(folder.iterdir())
    tokens = [load_file(step / TOKENS_FILE) for step in steps]
    targets = rows_of_steps([(step["input_ids"], step["positions"]) for step in tokens], batch)
    chosen = [load_file(step / CHOICES_FILE) for step in steps]
    layers = tuple(sorted(int(name.removeprefix("experts.")) for name in chosen[0] if name.startswith("experts.")))
    if not layers:
        raise EngineError(
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
