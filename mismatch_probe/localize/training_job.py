"""The training path's job: pi scored and recorded on the same ids, then the FP32 reference's walk over both sides."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.localize.engine_job import NOT_16_BIT, TOGETHER, InFP32, ScoreCall, try_parts
from mismatch_probe.localize.workspace import JobInput, JobNotes, Workspace, activation_batches
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence, is_layer, write_sums
from mismatch_probe.records.tables import leg_table, read_table, sequences_of, write_table
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.inside.fp32_parts import ATTENTION, EVERYTHING, model_part_in_fp32, model_parts
from mismatch_probe.training_path.inside.recording import record_activations
from mismatch_probe.training_path.inside.reference_walk import ReferenceWalk
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.precision import load_reference_model, load_training_model, undivided_modules
from mismatch_probe.training_path.scorer import Scorer


def run_training_job(workspace: Workspace, tell: Callable[[str], None]) -> JobNotes:
    """`tell` receives how far it is."""
    task = workspace.read_task()
    sequences = sequences_of(read_table(workspace.rollouts))
    notes = JobNotes()
    _score_and_record(workspace, task, sequences, notes, tell)
    _walk(workspace, task, sequences, notes, tell)
    notes.stored_bytes = workspace.activations.num_bytes()
    return notes


def _score_and_record(
    workspace: Workspace, task: JobInput, sequences: list[TokenSequence], notes: JobNotes, tell: Callable[[str], None]
) -> None:
    """pi scores every response, plainly and with parts in FP32; what is looked into is recorded besides."""
    settings = task.settings
    folder = Path(task.folder)
    tell(f"loading the model in {settings.train_dtype}")
    model, arithmetic = load_training_model(
        folder,
        settings.train_dtype,
        settings.training,
        choose_device(settings.training.device),
        trust_remote_code=settings.model.trust_remote_code,
    )
    batches = plan_batches([sequence.num_tokens for sequence in sequences], settings.training.batch_tokens)
    with Scorer(
        folder, model, arithmetic, settings.training, temperature=1.0, weights_dtype=settings.train_dtype
    ) as scorer:

        def score() -> list[ScoredSequence]:
            batches_of_scores = (scorer.score_batch([sequences[row] for row in rows]) for rows in batches)
            of_id = {scores.id: scores for batch in batches_of_scores for scores in batch}
            return [of_id[sequence.id] for sequence in sequences]

        tell("scoring the responses")
        write_table(workspace.leg("train"), leg_table(sequences, score()))
        if settings.interventions:
            try_training_parts(workspace, settings, model, sequences, score, notes, tell)
        tell("recording what its layers compute")
        start = time.perf_counter()
        batches_to_record = activation_batches(sequences, task)
        record_activations(model, arithmetic, batches_to_record, workspace.activations, modules=settings.modules)
        notes.seconds["record train"] = time.perf_counter() - start


def _walk(
    workspace: Workspace, task: JobInput, sequences: list[TokenSequence], notes: JobNotes, tell: Callable[[str], None]
) -> None:
    settings = task.settings
    tell("loading the FP32 reference")
    model, arithmetic, _ = load_reference_model(
        Path(task.folder),
        Dtype.FP32,
        settings.training,
        choose_device(settings.training.device),
        rounded_to=None,
        trust_remote_code=settings.model.trust_remote_code,
    )
    tell("holding both sides against the FP32 reference")
    walk = ReferenceWalk(model, arithmetic, workspace.activations, modules=settings.modules)
    start = time.perf_counter()
    walk.run(activation_batches(sequences, task))
    notes.seconds["walk reference"] = time.perf_counter() - start
    write_sums(workspace.sums, walk.places(), walk.routers())
    layers = undivided_modules(model)
    notes.layout = {"layer_paths": [path for path, module in model.named_modules() if module in layers]}


def try_training_parts(
    workspace: Workspace,
    settings: LocalizeSettings,
    model: PreTrainedModel,
    sequences: Sequence[TokenSequence],
    score: ScoreCall,
    notes: JobNotes,
    tell: Callable[[str], None],
) -> None:
    """Try every part, every layer, all parts together, and the whole model; `notes` list what cannot be tried."""
    if not settings.train_dtype.rounds_coarsely or settings.training.precision not in ("weights", "to"):
        notes.left_out["training path"] = NOT_16_BIT
        return
    names = model_parts(model)
    if settings.training.attention == "flash_attention_2":
        names.remove(ATTENTION)
        notes.left_out["attention of the training path"] = "flash_attention_2 does not compute in FP32"
    parts: dict[str, InFP32] = {name: partial(model_part_in_fp32, model, name) for name in [*names, EVERYTHING]}
    parts[TOGETHER] = partial(_all_in_fp32, model, [name for name in names if not is_layer(name)])
    notes.trials += try_parts(workspace, "train", sequences, score, parts, tell)


@contextmanager
def _all_in_fp32(model: PreTrainedModel, parts: Sequence[str]) -> Iterator[int]:
    with ExitStack() as stack:
        yield sum(stack.enter_context(model_part_in_fp32(model, part)) for part in parts)
