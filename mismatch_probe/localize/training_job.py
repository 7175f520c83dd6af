"""The training path's job: pi recorded on the same ids, then the FP32 reference's walk over both sides."""

import time
from pathlib import Path

from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.looked_into import activation_batches
from mismatch_probe.localize.workspace import JobNotes, Task, Workspace
from mismatch_probe.records.place_errors import write_sums
from mismatch_probe.records.rows import leg_table, sequences_of
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.records.tables import read_table, write_table
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.inside.recording import record_activations
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.precision import decoder_layers, load_reference_model, load_training_model
from mismatch_probe.training_path.scorer import Scorer


def run_training_job(workspace: Workspace) -> JobNotes:
    """
    Raises:
        EngineError: the model cannot be loaded, or not be looked into.
        OutOfMemory: it does not fit.
        StorageError: the disk refused.
    """
    task = workspace.read_task()
    sequences = sequences_of(read_table(workspace.rollouts))
    seconds: dict[str, float] = {}
    _record(workspace, task, sequences, seconds)
    layer_paths = _walk(workspace, task, sequences, seconds)
    return JobNotes(
        seconds=seconds, layout={"layer_paths": layer_paths}, stored_bytes=workspace.activations.num_bytes()
    )


def _record(workspace: Workspace, task: Task, sequences: list[TokenSequence], seconds: dict[str, float]) -> None:
    """pi scores every sequence plainly, and those that are looked into with hooks."""
    settings = task.settings
    folder = Path(task.folder)
    model, arithmetic = load_training_model(
        folder,
        settings.train_dtype,
        settings.training,
        choose_device(settings.training.device),
        trust_remote_code=settings.model.trust_remote_code,
    )
    with Scorer(
        folder, model, arithmetic, settings.training, temperature=1.0, weights_dtype=settings.train_dtype
    ) as scorer:
        scored: dict[str, ScoredSequence] = {}
        for rows in plan_batches([one.num_tokens for one in sequences], settings.training.batch_tokens):
            scored |= {one.id: one for one in scorer.score_batch([sequences[row] for row in rows])}
        write_table(workspace.leg("train"), leg_table(sequences, [scored[one.id] for one in sequences]))
        begun = time.perf_counter()
        batches = activation_batches(sequences, task)
        record_activations(model, arithmetic, batches, workspace.activations, modules=settings.modules)
        seconds["record train"] = time.perf_counter() - begun


def _walk(workspace: Workspace, task: Task, sequences: list[TokenSequence], seconds: dict[str, float]) -> list[str]:
    """The paths of the layers."""
    settings = task.settings
    reference_dtype: Dtype = "fp32"
    model, arithmetic = load_reference_model(
        Path(task.folder),
        reference_dtype,
        settings.training,
        choose_device(settings.training.device),
        rounded_to=None,
        trust_remote_code=settings.model.trust_remote_code,
    )
    walk = ReferenceWalk(model, arithmetic, workspace.activations, modules=settings.modules)
    begun = time.perf_counter()
    walk.run(activation_batches(sequences, task))
    seconds["walk reference"] = time.perf_counter() - begun
    write_sums(workspace.sums, walk.places(), walk.routers())
    layers = decoder_layers(model)
    return [path for path, module in model.named_modules() if module in layers]
