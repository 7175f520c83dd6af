"""Inside a running vLLM: its activations on given token ids, and a part of it in FP32.

vLLM cuts a batch into steps as it likes; which rows of a step belong to which sequence follows from the token ids and
positions that the model was given, so that recorded rows are of the tokens asked for or there is an error.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.vllm.engine import VllmEngine
from mismatch_probe.engines.vllm.hooks import TOKENS_FILE
from mismatch_probe.engines.vllm.outputs import canonical_tensors, rows_of_steps
from mismatch_probe.engines.vllm.worker_weights import LM_HEAD, ROUTER
from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import HEAD, INFER, NORM, ActivationBatch, ActivationStore, key
from mismatch_probe.records.sequences import ScoredSequence


def record_activations(
    engine: Engine, batches: Sequence[ActivationBatch], store: ActivationStore, *, modules: bool, side: str = INFER
) -> tuple[dict[str, Any], list[ScoredSequence]]:
    """Replay the batches one by one and record each as `side`; the model's layout, and the scores of all sequences.

    Raises:
        EngineError: the engine is of another kind, has several workers, or ran other tokens than those given.
    """
    if not isinstance(engine, VllmEngine) or engine.effective_settings()["num_workers"] != 1:
        raise EngineError(
            "activations are read inside one vLLM worker, and this engine has several; "
            "leave --vllm.tensor_parallel_size and its like at 1"
        )
    layout: dict[str, Any]
    (layout,) = engine.llm.collective_rpc("probe_layout")
    scores: list[ScoredSequence] = []
    for batch in batches:
        target = store.file(side, batch.number, None).parent
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=store.root) as steps:
            engine.llm.collective_rpc("probe_record", args=(steps, modules))
            try:
                scores += engine.replay(batch.sequences)
            finally:
                engine.llm.collective_rpc("probe_record_stop")
            _gather(Path(steps), batch, store, layout, side)
        if modules and batch.logit_rows:
            _record_logits(engine, store.file(side, batch.number, None), batch)
    return layout, scores


def _gather(steps: Path, batch: ActivationBatch, store: ActivationStore, layout: Mapping[str, Any], side: str) -> None:
    """The steps of one batch as files of one row a token."""
    folders = sorted(steps.iterdir())
    sources = [load_file(folder / TOKENS_FILE) for folder in folders]
    targets = rows_of_steps([(step["input_ids"], step["positions"]) for step in sources], batch)
    for name in sorted(path.name for path in folders[0].iterdir() if path.name != TOKENS_FILE):
        layer = None if name.startswith("outside") else int(name.removeprefix("layer-").removesuffix(".safetensors"))
        tensors: dict[str, Tensor] = {}
        for folder, target_T in zip(folders, targets, strict=True):
            kept_T = target_T >= 0
            for key_of_step, tensor in load_file(folder / name).items():
                if key_of_step not in tensors:
                    tensors[key_of_step] = tensor.new_empty(sum(batch.rows_per_sequence), tensor.shape[1])
                tensors[key_of_step][target_T[kept_T]] = tensor[kept_T]
        save_file(canonical_tensors(tensors, layout), store.file(side, batch.number, layer))


def _record_logits(engine: VllmEngine, path: Path, batch: ActivationBatch) -> None:
    """The engine's own head on the final hidden states of the chosen rows."""
    outside = load_file(path)
    if key(NORM, "out") not in outside:
        return
    hidden_rows = outside[key(NORM, "out")][batch.logit_rows].contiguous()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, target = Path(folder) / "hidden.safetensors", Path(folder) / "logits.safetensors"
        save_file({"hidden": hidden_rows}, source)
        engine.llm.collective_rpc("probe_logits", args=(str(source), str(target)))
        logits = load_file(target)["logits"]
    save_file({**outside, key(HEAD, "in0"): hidden_rows, key(HEAD, "out"): logits}, path)


def engine_parts(engine: Engine) -> list[str]:
    """What can be computed in FP32 in this engine."""
    assert isinstance(engine, VllmEngine)
    routers = engine.llm.collective_rpc("probe_num_routers")
    return [LM_HEAD, ROUTER] if any(routers) else [LM_HEAD]


@contextmanager
def engine_part_in_fp32(engine: Engine, part: str) -> Iterator[int]:
    """Compute `part` in FP32 inside; gives the bytes of FP32 weights that it keeps: none, each pass makes them."""
    assert isinstance(engine, VllmEngine)
    engine.llm.collective_rpc("probe_raise", args=(part,))
    try:
        yield 0
    finally:
        engine.llm.collective_rpc("probe_lower")
