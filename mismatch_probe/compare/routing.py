"""Both sides' choice of experts: recorded on the same few responses, and set against each other."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.batches import run_batches, skip
from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.plan import fixed_batches
from mismatch_probe.compare.stages import EngineRoutingStage, RoutingStage, repeated_rows
from mismatch_probe.config.comparison import PairName
from mismatch_probe.errors import BrokenRecord, RoutingUnseen
from mismatch_probe.records.legs import ROUTING, Legs, SequenceRouting, routing_of, routing_table
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.results import RoutingCheck
from mismatch_probe.stats.sequences import Sequences, TokenPair, rows_of
from mismatch_probe.stats.subsamples import Ids, Weights, other_experts, routing_check, weight_distance

Record = Callable[[Sequence[TokenSequence]], list[SequenceRouting]]


def routed(sequences: Sequence[TokenSequence], manifest: Manifest) -> list[TokenSequence]:
    """The responses of one engine whose tokens' experts are recorded."""
    rows = repeated_rows(sequences, manifest.settings.experts.num_sequences or 0)
    return [sequences[row] for row in rows]


def record_routing(
    run: RunDirectory,
    stage: EngineRoutingStage | RoutingStage,
    sequences: Sequence[TokenSequence],
    record: Record,
    events: Send,
) -> None:
    """One response after another; the stage is skipped where `record` says that the experts cannot be read.

    Raises:
        EngineError: the side failed.
        StorageError: a batch could not be recorded.
    """

    def work(rows: list[int]) -> tuple[dict[str, pa.Table], int]:
        batch = [sequences[row] for row in rows]
        table = routing_table(batch, record(batch))
        return {stage.leg: table}, sum(len(sequence.token_ids) for sequence in batch)

    parts = run.parts(stage.name, stage.outputs)
    try:
        run_batches(parts, stage.name, fixed_batches(len(sequences), 1), work, events)
    except RoutingUnseen as error:
        parts.remove()
        skip(stage.name, str(error), events)


def routing_of_pair(legs: Legs, manifest: Manifest, name: PairName, data: PairData) -> RoutingCheck | str | None:
    """Both sides' choices on the responses where both are recorded, or why there are none; None for a dense model.

    Raises:
        BrokenRecord: a leg is damaged.
    """
    if not manifest.settings.experts.num_sequences:
        return None
    sides = manifest.settings.mu(name[1]), manifest.settings.pi(name[0])
    records = [manifest.stages.get(side.stage("routing")) for side in sides]
    why_not = next((record.note for record in records if record is not None and record.note), "not recorded")
    if data.pair is None:
        return why_not
    mu, pi = (_routing_of(legs, side.leg("routing"), data) for side in sides)
    row_ids = data.row_ids
    rows = [row for row, row_id in enumerate(row_ids) if row_id in mu and row_id in pi]
    if not rows:
        return why_not
    return _check(data.pair, rows, [(mu[row_ids[row]], pi[row_ids[row]]) for row in rows], manifest)


def _routing_of(legs: Legs, name: str, data: PairData) -> dict[str, SequenceRouting]:
    """What a leg says of the positions that predict the pair's tokens, by id; empty where there is no leg."""
    if not legs.path(name).exists() or data.pair is None:
        return {}
    table = legs.read_rows(name, ROUTING)
    lengths = zip(data.prompt_lengths.tolist(), data.pair.sequences.lengths.tolist(), strict=True)
    tokens = dict(zip(data.row_ids, lengths, strict=True))
    routing = {}
    for choice, key in zip(routing_of(table), table["ids_key"].to_pylist(), strict=True):
        if data.key_of.get(choice.id) != key:
            continue
        prompt, response = tokens[choice.id]
        if not data.is_complete(data.row_ids.index(choice.id)):
            continue
        if choice.experts.shape[1] != prompt + response - 1:
            raise BrokenRecord(
                f"leg {name} has the experts of {choice.experts.shape[1]} tokens of {choice.id}, where "
                f"{prompt + response - 1} are computed: remove the file and continue with --resume"
            )
        routing[choice.id] = replace(
            choice, experts=choice.experts[:, prompt - 1 :], weights=choice.weights[:, prompt - 1 :]
        )
    return routing


def _check(
    pair: TokenPair, rows: list[int], routing: list[tuple[SequenceRouting, SequenceRouting]], manifest: Manifest
) -> RoutingCheck | str:
    layers = [layer for layer in routing[0][0].layers if layer in routing[0][1].layers]
    if not layers:
        return "the two sides have their experts in other layers"
    others, distances = [], []
    for mu, pi in routing:
        (mu_ids, mu_weights), (pi_ids, pi_weights) = (_of_layers(choice, layers) for choice in (mu, pi))
        others.append(other_experts(mu_ids, pi_ids))
        distances.append(weight_distance(mu_ids, mu_weights, pi_ids, pi_weights))
    by_response = rows_of(pair.diff, pair.sequences.offsets)
    return routing_check(
        Sequences.of_lengths(pair.sequences.lengths[rows], pair.sequences.clusters[rows]),
        layers,
        np.concatenate(others, axis=1),
        np.concatenate(distances, axis=1),
        np.concatenate([by_response[row] for row in rows]),
        manifest.settings.confidence,
    )


def _of_layers(choice: SequenceRouting, layers: Sequence[int]) -> tuple[Ids, Weights]:
    at = [choice.layers.index(layer) for layer in layers]
    return choice.experts[at], choice.weights[at]
