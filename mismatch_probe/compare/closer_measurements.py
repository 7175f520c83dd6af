"""What was measured more closely on a few responses, read back: the training path's floors, whole distributions."""

from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_probe.compare.stages import DECODED_ALONE
from mismatch_probe.config.sides import Side
from mismatch_probe.records.legs import Legs
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Estimate, FullVocabularyCheck
from mismatch_probe.stats.sequences import Reals, Repeat, Sequences, TokenPair, is_usable, rows_of
from mismatch_probe.stats.subsamples import full_vocabulary_check


def measured_repeats(legs: Legs, pi: Side, mu: Side, pair: TokenPair, key_of: Mapping[str, int]) -> dict[str, Repeat]:
    """What a side computed twice of a few of the pair's responses, whose keys are given by their ids, in its order.

    `pi_other_batch`, `mu_other_batch`: each alone against its batch, by prefill. `pi_again`: each alone twice.
    `pi_other_attention`: each alone, with the two implementations of attention. `mu_cached`: each alone, without and
    behind the prefix cache. `mu_decoded_alone`: the first tokens decoded among many and alone, as far as the same come
    out. What is not recorded, not finite, of other token ids, or of a response that lacks tokens is left out.
    """
    ids = list(key_of)
    offsets = pair.sequences.offsets
    in_batch = dict(zip(ids, rows_of(pair.log_pi, offsets), strict=True))
    prefilled = pair.log_mu_prefill
    decoded = dict(zip(ids, rows_of(pair.log_mu, offsets), strict=True))
    decoded_alone = {row_id: alone for row_id, alone in _decoded_alone(legs, mu, key_of).items() if alone.size}
    replayed = {} if prefilled is None else dict(zip(ids, rows_of(prefilled, offsets), strict=True))
    mu_alone, mu_cached = (_leg(legs, mu.leg(change), key_of) for change in ("alone", "cached"))
    alone, again, other = (_leg(legs, pi.leg(change), key_of) for change in ("alone", "again", "other-attention"))
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    twice = {
        "pi_again": (alone, again),
        "pi_other_batch": (in_batch, alone),
        "pi_other_attention": (alone, other),
        "mu_other_batch": (replayed, mu_alone),
        "mu_cached": (mu_alone, mu_cached),
        "mu_decoded_alone": (
            {row_id: decoded[row_id][: alone.size] for row_id, alone in decoded_alone.items()},
            decoded_alone,
        ),
    }
    repeats = {name: _repeat(*legs, cluster_of) for name, legs in twice.items()}
    return {name: repeat for name, repeat in repeats.items() if repeat is not None}


def _leg(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """Usable log-probs by id, empty where the leg was not recorded."""
    return {row_id: values for row_id, values in _rows(legs, name, key_of).items() if is_usable(values).all()}


def _rows(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    if not legs.path(name).exists():
        return {}
    table = legs.read(name, columns=["id", "ids_key", "logprobs"])
    rows = zip(table["id"].to_pylist(), table["ids_key"].to_pylist(), table["logprobs"].to_pylist(), strict=True)
    return {row_id: np.asarray(logprobs) for row_id, key, logprobs in rows if key_of.get(row_id) == key}


def _decoded_alone(legs: Legs, mu: Side, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """Log-probs of the first tokens as far as they come out the same alone, by id; maybe none."""
    recorded = _rows(legs, mu.leg("decoded-alone"), key_of)
    lengths = {row_id: np.append(is_usable(values), False).argmin() for row_id, values in recorded.items()}
    return {row_id: values[: lengths[row_id]] for row_id, values in recorded.items()}


def share_decoded_alike(
    legs: Legs, mu: Side, pair: TokenPair, key_of: Mapping[str, int], level: float
) -> Estimate | None:
    """Share of responses whose first tokens come out the same alone; None where none was decoded again."""
    alone = _decoded_alone(legs, mu, key_of)
    rows = [row for row, row_id in enumerate(key_of) if row_id in alone]
    if not rows:
        return None
    sequences = Sequences.of_lengths(pair.sequences.lengths[rows], pair.sequences.clusters[rows])
    decoded = np.asarray([alone[row_id].size for row_id in key_of if row_id in alone])
    return Estimator(sequences, level).share(decoded >= np.minimum(sequences.lengths, DECODED_ALONE), "sequence")


def _repeat(first: dict[str, Reals], second: dict[str, Reals], cluster_of: dict[str, int]) -> Repeat | None:
    shared = [row_id for row_id in first if row_id in second and first[row_id].size == second[row_id].size]
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
