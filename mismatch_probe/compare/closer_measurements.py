"""What was measured more closely on a few responses, read back: the training path's floors, whole distributions."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mismatch_probe.config.sides import Side
from mismatch_probe.records.legs import Legs
from mismatch_probe.stats.full_vocabulary import full_vocabulary_check
from mismatch_probe.stats.results import FullVocabularyCheck
from mismatch_probe.stats.sequences import Reals, Repeat, Sequences, TokenPair, is_usable

FloatVector = npt.NDArray[np.float64]


def measured_repeats(
    legs: Legs, pi: Side, mu: Side, pair: TokenPair, ids: Sequence[str], keys: Sequence[int]
) -> dict[str, Repeat]:
    """What a side computed twice of a few of the pair's responses, whose ids and keys are given in its order.

    `pi_other_batch`, `mu_other_batch`: each alone against its batch, by prefill. `pi_again`: each alone twice.
    `pi_other_attention`: each alone, with the two implementations of attention. `mu_cached`: each alone, without and
    behind the prefix cache. What is not recorded, not finite, or of other token ids is left out.
    """
    key_of = dict(zip(ids, keys, strict=True))
    by_response = pair.sequences.offsets[1:-1]
    in_batch = dict(zip(ids, np.split(pair.log_pi, by_response), strict=True))
    prefilled = pair.log_mu_prefill
    replayed = {} if prefilled is None else dict(zip(ids, np.split(prefilled, by_response), strict=True))
    mu_alone, mu_cached = (_leg(legs, mu.leg(change), key_of) for change in ("alone", "cached"))
    alone, again, other = (_leg(legs, pi.leg(change), key_of) for change in ("alone", "again", "other-attention"))
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    twice = {
        "pi_again": (alone, again),
        "pi_other_batch": (in_batch, alone),
        "pi_other_attention": (alone, other),
        "mu_other_batch": (replayed, mu_alone),
        "mu_cached": (mu_alone, mu_cached),
    }
    repeats = {name: _repeat(*legs, cluster_of) for name, legs in twice.items()}
    return {name: repeat for name, repeat in repeats.items() if repeat is not None}


def _leg(legs: Legs, name: str, key_of: dict[str, int]) -> dict[str, Reals]:
    """Log-probs by id, empty where the leg was not recorded."""
    if not legs.path(name).exists():
        return {}
    table = legs.read(name, columns=["id", "ids_key", "logprobs"])
    rows = zip(table["id"].to_pylist(), table["ids_key"].to_pylist(), table["logprobs"].to_pylist(), strict=True)
    recorded = {row_id: np.asarray(logprobs) for row_id, key, logprobs in rows if key_of.get(row_id) == key}
    return {row_id: logprobs for row_id, logprobs in recorded.items() if is_usable(logprobs).all()}


def _repeat(first: dict[str, Reals], second: dict[str, Reals], cluster_of: dict[str, int]) -> Repeat | None:
    shared = [row_id for row_id in first if row_id in second]
    if not shared:
        return None
    sequences = Sequences.of_lengths(
        [first[row_id].size for row_id in shared], [cluster_of[row_id] for row_id in shared]
    )
    return Repeat(sequences, *(np.concatenate([leg[row_id] for row_id in shared]) for leg in (first, second)))


def full_vocabulary_of(
    legs: Legs, pi: Side, mu: Side, pair: TokenPair, ids: Sequence[str], level: float
) -> FullVocabularyCheck | str:
    """The full-vocabulary check on the pair's responses, whose ids are given in its order, or why there is none."""
    name = pi.full_vocabulary_leg(mu)
    if not legs.path(name).exists():
        return "no whole distributions were recorded"
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    rows = [row for row in legs.read(name).to_pylist() if row["id"] in cluster_of]
    if not rows:
        return "no usable response has whole distributions"
    kl, tv, diff = (np.concatenate([np.asarray(row[name]) for row in rows]) for name in ("full_kl", "full_tv", "diff"))
    broken = ~np.isfinite([kl, tv, diff]).all(axis=0)
    if broken.any():
        return f"the whole distributions are not finite at {broken.sum()} of {broken.size} positions"
    sequences = Sequences.of_lengths([len(row["diff"]) for row in rows], [cluster_of[row["id"]] for row in rows])
    return full_vocabulary_check(sequences, diff, kl, tv, level)
