"""A leg of the reference that is computed layer by layer: all batches at once, recorded when the last layer is done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.batches import BatchDone, LayersDone, StageDone, StageStarted, send_event
from mismatch_probe.compare.stages import ScoreStage, TrainingStage, with_starts, without_starts
from mismatch_probe.config.sides import Side
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import leg_table
from mismatch_probe.training_path.by_layer.model import fit_in_memory, why_by_layer
from mismatch_probe.training_path.by_layer.scorer import HiddenStates, LayerByLayerScorer

_HIDDEN_STATES: Final = "hidden"


def why_layered(run: RunDirectory, manifest: Manifest, side: Side, stages: Sequence[TrainingStage]) -> str | None:
    """Why a reference is computed layer by layer; one that was begun so goes on so. None where it is loaded whole.

    Raises:
        UsageError: the checkpoint cannot be read, or there is no such device.
    """
    assert side.training is not None
    if any(any(run.parts(stage.name, stage.outputs).sibling(_HIDDEN_STATES).glob("*")) for stage in stages):
        return "it was begun so"
    folder = Path(manifest.identity_of(side).folder)
    return why_by_layer(folder, side.dtype, side.training, manifest.settings.reference)


def load_layered(manifest: Manifest, side: Side, why: str) -> LayerByLayerScorer:
    """Raises as `LayerByLayerScorer.load_layered`."""
    assert side.training is not None
    return LayerByLayerScorer.load_layered(
        Path(manifest.identity_of(side).folder),
        side.dtype,
        side.training,
        why=why,
        rounded_to=side.rounded_to,
        temperature=manifest.settings.sampling.temperature,
        trust_remote_code=side.model.trust_remote_code,
    )


def score_by_layer(
    run: RunDirectory,
    stage: ScoreStage,
    sequences: Sequence[TokenSequence],
    batches: Sequence[list[int]],
    scorer: LayerByLayerScorer,
    events: Send,
    *,
    double: bool,
) -> None:
    """Work through the batches that are not recorded yet, from the layer that was reached.

    Raises:
        StorageError: a batch or its hidden states could not be recorded.
    """
    parts = run.parts(stage.name, stage.outputs)
    parts.open()
    pending = {
        number: [sequences[row] for row in rows] for number, rows in enumerate(batches) if not parts.is_done(number)
    }
    send_event(events, StageStarted(stage=stage.name, batches=len(batches), batches_done=len(batches) - len(pending)))
    tokens = sum(sequence.num_tokens for batch in pending.values() for sequence in batch)
    in_memory = fit_in_memory(tokens * scorer.hidden_size * stage.side.dtype.num_bytes)
    states = HiddenStates(parts.sibling(_HIDDEN_STATES), in_memory=in_memory)

    def layer_done(num_layers: int, of: int) -> None:
        send_event(events, LayersDone(stage=stage.name, done=num_layers, of=of))

    with_prompts = {number: with_starts(batch) for number, batch in pending.items()}
    for batch in scorer.score_batches(with_prompts, states, layer_done):
        rows = pending[batch.number]
        scores = without_starts(batch.scores, rows)
        parts.write(batch.number, {stage.leg: leg_table(rows, scores, double=double)})
        states.forget(batch.number)
        response_tokens = sum(len(sequence.token_ids) for sequence in rows)
        event = BatchDone(stage=stage.name, sequences=len(rows), tokens=response_tokens, seconds=batch.seconds)
        send_event(events, event)
    send_event(events, StageDone(stage=stage.name))
