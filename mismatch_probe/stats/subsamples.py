"""Measurements on few responses: divergences over the whole vocabulary, the choice of experts, and the tokens that
responses to one prompt share.

Ids and weights are [..., K]: K experts for each of any number of tokens and layers.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.intervals import Scale, ratio
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.results import (
    LEVEL,
    Estimate,
    FullVocabularyCheck,
    LayerRouting,
    RoutingCheck,
    SampledAgainstExact,
)
from mismatch_probe.stats.sequences import Floats, Ints, Reals, Sequences, common_length


def divergences(log_mu: Reals, log_pi: Reals) -> tuple[Floats, Floats]:
    """Exact KL(mu || pi) and total variation at each position [P], from both policies' log-probs [P, V].

    Both are normalised in float64 first, so that the rounding error of a low-precision log-softmax does not count as
    divergence. A token that mu cannot draw adds nothing to the KL; one that only pi cannot draw makes it infinite. A
    position with a missing log-prob has NaN.

    Raises:
        ValueError: the two have different shapes.
    """
    if log_mu.shape != log_pi.shape:
        raise ValueError(f"log-probs of mu are {log_mu.shape}, of pi {log_pi.shape}")
    with np.errstate(invalid="ignore"):
        log_mu, log_pi = (
            values - np.logaddexp.reduce(values, axis=-1, keepdims=True)
            for values in (log_mu.astype(np.float64), log_pi.astype(np.float64))
        )
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    possible = mu != 0
    ratios = np.subtract(log_mu, log_pi, where=possible, out=np.zeros_like(mu))
    return (mu * ratios).sum(axis=-1), np.abs(mu - pi).sum(axis=-1) / 2


def full_vocabulary_check(
    sequences: Sequences, diff: Reals, full_kl: Reals, full_tv: Reals, level: float = LEVEL
) -> FullVocabularyCheck:
    """Exact KL(mu || pi) and total variation [T] at some positions, compared with the sampled estimators there.

    `sequences` lays out these positions, `diff` is d of their sampled tokens. k1 and k3 estimate the KL without
    bias, k2 to second order [Schulman 2020]; E_mu abs(1 - rho) / 2 is the total variation where mu covers pi [Levin
    and Peres 2017, Markov Chains and Mixing Times, section 4.1]. The comparison is by paired differences.

    Raises:
        ValueError: an array has another length, is not finite, or a divergence is negative beyond rounding.
    """
    exact = {"full_kl": full_kl, "full_tv": full_tv}
    for name, values in {"diff": diff, **exact}.items():
        if values.shape != (sequences.num_tokens,) or not np.isfinite(values).all():
            raise ValueError(f"{name} must be {sequences.num_tokens} finite numbers, one a position")
    for name, values in exact.items():
        if (values < -1e-6).any():
            raise ValueError(f"{name} is negative at a position, so it is not a divergence")
    estimator = Estimator(sequences, level)
    log_ratio, kl, tv = (values.astype(np.float64) for values in (diff, full_kl, full_tv))
    estimators = {
        "kl_k1": (-log_ratio, kl, Scale.SIGNED),
        "kl_k2": (log_ratio**2 / 2, kl, Scale.POSITIVE),
        "kl_k3": (k3_terms(log_ratio), kl, Scale.POSITIVE),
        "tv": (np.abs(np.expm1(log_ratio)) / 2, tv, Scale.POSITIVE),
    }
    return FullVocabularyCheck(
        full_kl=_require_finite_estimate(estimator.mean(kl, "token", Scale.POSITIVE)),
        full_tv=_require_finite_estimate(estimator.mean(tv, "token", Scale.POSITIVE)),
        estimators={name: _against(estimator, *legs) for name, legs in estimators.items()},
    )


def _against(estimator: Estimator, estimates: Floats, exact: Floats, scale: Scale) -> SampledAgainstExact:
    difference = _require_finite_estimate(estimator.mean(estimates - exact, "token"))
    agrees = difference.low is None or difference.high is None or difference.low <= 0 <= difference.high
    return SampledAgainstExact(_require_finite_estimate(estimator.mean(estimates, "token", scale)), difference, agrees)


def _require_finite_estimate(estimate: Estimate | None) -> Estimate:
    if estimate is None:
        raise ValueError("a log-ratio is so large that its exponential is beyond the largest float64")
    return estimate


MOVED: Final = 0.1
"""The share of tokens, those with the largest distance of weights, whose part of the squared deviation is measured."""

Ids = NDArray[np.int32]
ExpertWeights = NDArray[np.float32]


def other_experts(first: Ids, second: Ids) -> NDArray[np.bool_]:
    """Whether the second side takes another set of experts [...]; their order does not count."""
    if first.shape != second.shape:
        return np.ones(first.shape[:-1], dtype=bool)
    differs: NDArray[np.bool_] = np.any(np.sort(first, axis=-1) != np.sort(second, axis=-1), axis=-1)
    return differs


def weight_distance(
    first_ids: Ids, first_weights: ExpertWeights, second_ids: Ids, second_weights: ExpertWeights
) -> NDArray[np.float64]:
    """Half the sum over experts of the absolute difference of their weights [...]; an expert not taken has weight 0.

    Where weights sum to 1 it is the total variation between the two choices: 0 where they are equal, 1 where they share
    no expert.
    """
    num_experts = 1 + int(max(first_ids.max(initial=0), second_ids.max(initial=0)))
    difference = _dense(first_ids, first_weights, num_experts) - _dense(second_ids, second_weights, num_experts)
    distance: NDArray[np.float64] = np.abs(difference).sum(axis=-1) / 2
    return distance


def routing_check(
    sequences: Sequences,
    layers: Sequence[int],
    others: NDArray[np.bool_],
    distances: NDArray[np.float64],
    diff: Floats,
    level: float = LEVEL,
) -> RoutingCheck:
    """How far two sides' choices of experts explain d [T], from `other_experts` and `weight_distance` [L, T]."""
    estimator = Estimator(sequences, level)
    squares, mean_distances = diff**2, distances.mean(axis=0)
    is_far = mean_distances > np.quantile(mean_distances, 1 - MOVED)
    totals = [estimator.totals(values, "token") for values in (squares * is_far, squares)]
    counts = estimator.counts("token")
    return RoutingCheck(
        layers=[
            LayerRouting(layer, estimator.share(others[at], "token"), _mean_over_tokens(estimator, distances[at]))
            for at, layer in enumerate(layers)
        ],
        other_experts=estimator.share_of_totals(
            estimator.totals(others.sum(axis=0), "token"), counts * len(layers), "token"
        ),
        in_some_layer=estimator.share(np.asarray(others.any(axis=0)), "token"),
        weight_distance=_mean_over_tokens(estimator, mean_distances),
        squares_where_moved=estimator.smooth(ratio, totals, "token", Scale.SHARE) if squares.any() else None,
    )


def _mean_over_tokens(estimator: Estimator, distances: NDArray[np.float64]) -> Estimate:
    estimate = estimator.mean(distances, "token", Scale.POSITIVE)
    assert estimate is not None, "distances lie between 0 and the sum of weights"
    return estimate


def _dense(ids: Ids, weights: ExpertWeights, num_experts: int) -> NDArray[np.float64]:
    dense = np.zeros((*ids.shape[:-1], num_experts))
    np.put_along_axis(dense, ids.astype(np.int64), weights.astype(np.float64), axis=-1)
    return dense


IdsOfResponse = tuple[list[int], list[int]]
"""Those of a prompt and of the response to it."""


@dataclass(frozen=True)
class SharedTokens:
    """Tokens that two responses to one prompt share: equal ids behind equal ids."""

    prompt: int
    """The cluster of both responses."""
    first: Ints
    """Flat indices of the tokens in one response [n]."""
    second: Ints
    """Those in the other [n]."""
    are_all: bool
    """The two responses have no other token."""


def shared_tokens(
    keys: Sequence[Hashable],
    ids_of: Callable[[int], IdsOfResponse],
    positions: Callable[[int], Ints],
    sequences: Sequences,
) -> list[SharedTokens]:
    """The tokens that responses with equal keys share before they part: each response is compared with the next one in
    the order of ids, so that no occurrence of a context is left out.

    keys: one for each of N `sequences`. positions: the places in a response of the tokens that its sequence holds.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    pieces = []
    for group in (group for group in groups.values() if len(group) > 1):
        ids = {row: ids_of(row) for row in group}
        for row, next_row in pairwise(sorted(group, key=ids.__getitem__)):
            (prompt, response), (next_prompt, next_response) = ids[row], ids[next_row]
            length = common_length(np.asarray(response), np.asarray(next_response)) if prompt == next_prompt else 0
            places, next_places = positions(row), positions(next_row)
            places, next_places = places[places < length], next_places[next_places < length]
            _, first, second = np.intersect1d(places, next_places, return_indices=True)
            if first.size:
                start, next_start = int(sequences.offsets[row]), int(sequences.offsets[next_row])
                cluster, are_all = int(sequences.clusters[row]), ids[row] == ids[next_row]
                pieces.append(SharedTokens(cluster, start + first, next_start + second, are_all))
    return pieces
