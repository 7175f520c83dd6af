"""Where both policies' whole distributions meet: mu's are there as parts, pi's are computed, and numbers remain.

mu's distribution is that of its prefill, from a context of its own for each position; pi's comes from one pass over the
response. The log-ratio of the sampled token is taken from the same two rows.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np
import pyarrow as pa

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.batches import run_batches, skip
from mismatch_probe.compare.plan import fixed_batches
from mismatch_probe.compare.stages import DistributionsStage, FullVocabularyStage
from mismatch_probe.errors import EngineError
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import FULL_VOCABULARY
from mismatch_probe.stats.full_vocabulary import divergences
from mismatch_probe.stats.sequences import is_missing
from mismatch_probe.training_path.ranks.scorer import RanksScorer
from mismatch_probe.training_path.scorer import Scorer

_SEQUENCES_PER_BATCH: Final = 16


def compare_distributions(
    run: RunDirectory,
    manifest: Manifest,
    stage: FullVocabularyStage,
    sequences: Sequence[TokenSequence],
    scorer: Scorer | RanksScorer,
    events: Send,
) -> None:
    """pi's distributions against the recorded ones, reduced to three numbers a position.

    Raises:
        EngineError: the two sides have vocabularies of different size.
        OutOfMemory: a response does not fit.
        StorageError: a batch could not be recorded.
    """
    source = DistributionsStage(stage.mu)
    record = manifest.stages[source.name]
    if record.state == "skipped":
        skip(stage.name, record.note, events)
        return
    recorded = run.parts(source.name, source.outputs).read(record.batches, "distributions")
    of_id = {sequence.id: sequence for sequence in sequences}
    groups = [list(group) for _, group in groupby(range(recorded.num_rows), recorded["id"].to_pylist().__getitem__)]

    def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
        rows = [_compared(recorded.take(groups[number]), of_id, scorer) for number in numbers]
        return {stage.leg: pa.Table.from_pylist(rows, schema=FULL_VOCABULARY)}, sum(len(row["diff"]) for row in rows)

    run_batches(
        run.parts(stage.name, stage.outputs), stage.name, fixed_batches(len(groups), _SEQUENCES_PER_BATCH), work, events
    )


def _compared(
    recorded: pa.Table, of_id: dict[str, TokenSequence], scorer: Scorer | RanksScorer
) -> dict[str, list[float]]:
    """The row of one response."""
    sequence = of_id[recorded["id"][0].as_py()]
    positions = recorded["position"].to_pylist()
    log_mu = np.stack(recorded["logprobs"].to_numpy())
    log_pi = scorer.distributions(sequence, positions)
    if log_mu.shape != log_pi.shape:
        raise EngineError(
            f"the engine has {log_mu.shape[1]} log-probs a position and the training path {log_pi.shape[1]}, so whole "
            "distributions cannot be compared; set full_vocabulary.positions to 0"
        )
    kl, tv = divergences(log_mu, log_pi)
    sampled = np.arange(len(positions)), [sequence.token_ids[position] for position in positions]
    diff = np.subtract(log_pi[sampled], log_mu[sampled], dtype=np.float64)
    diff[is_missing(log_pi[sampled]) | is_missing(log_mu[sampled])] = np.nan
    return {"id": sequence.id, "positions": positions, "full_kl": kl, "full_tv": tv, "diff": diff}
