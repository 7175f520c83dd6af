"""What a log's numbers cannot be once the vocabulary of its model is known."""

import numpy as np
import pyarrow as pa

from mismatch_probe.importing.run import LOG_SIDE, note_of
from mismatch_probe.logs.checks.units import UnitSums, unit_findings
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.manifest import LogNote, Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import in_order
from mismatch_probe.stats.sequences import is_usable, of_sampled_tokens
from mismatch_probe.stats.units import moments


def vocabulary_notes(imported: RunDirectory, manifest: Manifest, rollouts: pa.Table, size: int | None) -> list[LogNote]:
    """Notes on the logged sides of these responses that a vocabulary of this size cannot give; none where it is not
    known.
    """
    if size is None:
        return []
    legs, ids = Legs(imported, manifest.run_key), rollouts["id"].to_pylist()
    sampled = [np.asarray(mask, dtype=np.bool_) for mask in rollouts["sampled"].to_pylist()]
    sums = UnitSums()
    mu = in_order(legs.read(manifest.settings.mu(LOG_SIDE).leg("decode")), ids)["logprobs"].to_pylist()
    for values, mask in zip(mu, sampled, strict=True):
        log_mu = of_sampled_tokens(np.asarray(values, dtype=np.float64)[mask])
        sums.surprisal = sums.surprisal + moments(-log_mu[is_usable(log_mu)])
    pi = next((side for side in manifest.settings.train_sides if side.logged), None)
    entropies = [] if pi is None else in_order(legs.read(pi.leg()), ids)["entropy_nats"].to_pylist()
    for values, mask, where in zip(entropies, sampled, rollouts["where"].to_pylist(), strict=False):
        highest = np.nanmax(np.asarray(values, dtype=np.float64)[mask], initial=0.0) if values is not None else 0.0
        if highest > sums.highest_entropy:
            sums.highest_entropy, sums.highest_at = float(highest), where
    return [note_of(finding) for finding in unit_findings(sums, size)]
