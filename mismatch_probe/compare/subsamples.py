"""What a comparison measures on a few responses only: repeated scores, whole distributions and the choice of experts.

mu's distribution is that of its prefill, from a context of its own for each position; pi's comes from one pass over the
response. The log-ratio of the sampled token is taken from the same two rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np
import pyarrow as pa

from mismatch_probe.children.messages import Send
from mismatch_probe.compare.pair_data import PairData
from mismatch_probe.compare.plan import fixed_batches, run_batches, skip
from mismatch_probe.compare.stages import (
    DECODED_ALONE,
    START_TOKENS,
    DistributionsStage,
    EngineRoutingStage,
    FullVocabularyStage,
    RoutingStage,
    repeated_rows,
)
from mismatch_probe.config.comparison import PairName
from mismatch_probe.config.sides import Side
from mismatch_probe.errors import BrokenRecord, EngineError, RoutingUnseen
from mismatch_probe.records.legs import ROUTING, Legs, SequenceRouting, routing_of, routing_table
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import FloatArray, TokenSequence
from mismatch_probe.records.tables import FULL_VOCABULARY
from mismatch_probe.stats.estimator import Estimator
from mismatch_probe.stats.results import Estimate, FullVocabularyCheck, RoutingCheck
from mismatch_probe.stats.sequences import Ints, Reals, Repeat, Sequences, TokenPair, is_missing, is_usable, rows_of
from mismatch_probe.stats.subsamples import (
    ExpertWeights,
    Ids,
    IdsOfResponse,
    SharedTokens,
    divergences,
    full_vocabulary_check,
    other_experts,
    routing_check,
    shared_tokens,
    weight_distance,
)
from mismatch_probe.verdict.signatures.weights import LEAST_RESPONSES, LEAST_TOKENS

_SEQUENCES_PER_BATCH: Final = 16

RoutingRecorder = Callable[[Sequence[TokenSequence]], list[SequenceRouting]]
Distributions = Callable[[TokenSequence, Sequence[int]], FloatArray]
"""The log-probs [P, V] of the whole vocabulary at some positions of a response."""


def compare_distributions(
    run: RunDirectory,
    manifest: Manifest,
    stage: FullVocabularyStage,
    sequences: Sequence[TokenSequence],
    distributions_of: Distributions,
    events: Send,
) -> None:
    """Compare pi's distributions with the recorded ones of mu: three numbers for each position."""
    source = DistributionsStage(stage.mu)
    record = manifest.stages[source.name]
    if record.state == "skipped":
        skip(stage.name, record.note, events)
        return
    distributions = run.parts(source.name, source.outputs).read(record.batches, "distributions")
    of_id = {sequence.id: sequence for sequence in sequences}
    groups = [
        list(group) for _, group in groupby(range(distributions.num_rows), distributions["id"].to_pylist().__getitem__)
    ]

    def work(numbers: list[int]) -> tuple[dict[str, pa.Table], int]:
        rows = [
            _divergences_of_response(distributions.take(groups[number]), of_id, distributions_of) for number in numbers
        ]
        return {stage.leg: pa.Table.from_pylist(rows, schema=FULL_VOCABULARY)}, sum(len(row["diff"]) for row in rows)

    run_batches(
        run.parts(stage.name, stage.outputs), stage.name, fixed_batches(len(groups), _SEQUENCES_PER_BATCH), work, events
    )


def _divergences_of_response(
    distributions: pa.Table, of_id: dict[str, TokenSequence], distributions_of: Distributions
) -> dict[str, list[float]]:
    """The row of one response."""
    sequence = of_id[distributions["id"][0].as_py()]
    positions = distributions["position"].to_pylist()
    log_mu = np.stack(distributions["logprobs"].to_numpy())
    log_pi = distributions_of(sequence, positions)
    if log_mu.shape != log_pi.shape:
        raise EngineError(
            f"the engine has {log_mu.shape[1]} log-probs a position and the training path {log_pi.shape[1]}, so whole "
            "distributions cannot be compared; set full_vocabulary.positions to 0"
        )
    kl, tv = divergences(log_mu, log_pi)
    targets = np.arange(len(positions)), [sequence.token_ids[position] for position in positions]
    diff = np.subtract(log_pi[targets], log_mu[targets], dtype=np.float64)
    diff[is_missing(log_pi[targets]) | is_missing(log_mu[targets])] = np.nan
    return {"id": sequence.id, "positions": positions, "full_kl": kl, "full_tv": tv, "diff": diff}


def responses_with_experts(sequences: Sequence[TokenSequence], manifest: Manifest) -> list[TokenSequence]:
    """The responses of one engine whose tokens' experts are recorded."""
    rows = repeated_rows(sequences, manifest.settings.experts.num_sequences or 0)
    return [sequences[row] for row in rows]


def record_routing(
    run: RunDirectory,
    stage: EngineRoutingStage | RoutingStage,
    sequences: Sequence[TokenSequence],
    record: RoutingRecorder,
    events: Send,
) -> None:
    """Record the experts, one response after another; the stage is skipped where they cannot be read."""

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
    """Compare both sides' choices of experts, or why that is impossible; None for a dense model."""
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
    return _routing_check(data.pair, rows, [(mu[row_ids[row]], pi[row_ids[row]]) for row in rows], manifest)


def _routing_of(legs: Legs, name: str, data: PairData) -> dict[str, SequenceRouting]:
    """The experts of a leg at the positions that predict the pair's tokens, by id; empty where there is no leg."""
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


def _routing_check(
    pair: TokenPair, rows: list[int], routing: list[tuple[SequenceRouting, SequenceRouting]], manifest: Manifest
) -> RoutingCheck | str:
    layers = [layer for layer in routing[0][0].layers if layer in routing[0][1].layers]
    if not layers:
        return "the two sides have their experts in other layers"
    others, distances = [], []
    for mu, pi in routing:
        (mu_ids, mu_weights), (pi_ids, pi_weights) = (_choice_in_layers(choice, layers) for choice in (mu, pi))
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


def _choice_in_layers(choice: SequenceRouting, layers: Sequence[int]) -> tuple[Ids, ExpertWeights]:
    at = [choice.layers.index(layer) for layer in layers]
    return choice.experts[at], choice.weights[at]


def measured_repeats(legs: Legs, pi: Side, mu: Side, data: PairData, key_of: Mapping[str, int]) -> dict[str, Repeat]:
    """The scores that a side computed twice, on a few of the pair's responses (`key_of` has their keys, in order).

    - `pi_other_batch`, `mu_other_batch`: a response alone against its batch, by prefill.
    - `pi_again`: a response alone, twice.
    - `pi_other_attention`: a response alone, with two implementations of attention.
    - `mu_cached`: a response alone, without and with the prefix cache.
    - `mu_decoded_alone`: the first tokens decoded among many and alone, as far as they are equal.
    - `mu_siblings`, of a log also `pi_siblings`: what responses to one prompt share. Our own training path computes a
      shared prefix once.

    Scores that are not recorded, not finite, of other token ids, or of an incomplete response are left out.
    """
    ids, pair = list(key_of), data.pair
    assert pair is not None
    offsets = pair.sequences.offsets
    in_batch = dict(zip(ids, rows_of(pair.log_pi, offsets), strict=True))
    log_mu_prefill = pair.log_mu_prefill
    decode_rows = dict(zip(ids, rows_of(pair.log_mu, offsets), strict=True))
    decoded_alone = {
        row_id: pi_alone for row_id, pi_alone in _decoded_alone_rows(legs, mu, key_of).items() if pi_alone.size
    }
    prefill_rows = {} if log_mu_prefill is None else dict(zip(ids, rows_of(log_mu_prefill, offsets), strict=True))
    mu_alone, mu_cached = (_usable_leg(legs, mu.leg(change), key_of) for change in ("alone", "cached"))
    pi_alone, pi_again, other = (
        _usable_leg(legs, pi.leg(change), key_of) for change in ("alone", "again", "other-attention")
    )
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    leg_pairs = {
        "pi_again": (pi_alone, pi_again),
        "pi_other_batch": (in_batch, pi_alone),
        "pi_other_attention": (pi_alone, other),
        "mu_other_batch": (prefill_rows, mu_alone),
        "mu_cached": (mu_alone, mu_cached),
        "mu_decoded_alone": (
            {row_id: decode_rows[row_id][: pi_alone.size] for row_id, pi_alone in decoded_alone.items()},
            decoded_alone,
        ),
    }
    repeats = {name: _repeat_of(*legs, cluster_of) for name, legs in leg_pairs.items()}
    pieces = _shared_tokens_of(data.rollouts.take(pa.array(data.rows)), data.measured_positions, pair.sequences)
    repeats["mu_siblings"] = sibling_repeat(pieces, pair.log_mu)
    if pi.logged:
        repeats["pi_siblings"] = sibling_repeat(pieces, pair.log_pi)
    return {name: repeat for name, repeat in repeats.items() if repeat is not None}


def _shared_tokens_of(rollouts: pa.Table, positions: Callable[[int], Ints], sequences: Sequences) -> list[SharedTokens]:
    """`shared_tokens` of responses to one prompt under the same recorded weights; a row for each of `sequences`."""
    names = [name for name in ("prompt_id", "step", "weight_version") if name in rollouts.column_names]
    keys = zip(*(rollouts[name].to_pylist() for name in names), strict=True)

    def ids(row: int) -> IdsOfResponse:
        return rollouts["prompt_token_ids"][row].as_py(), rollouts["token_ids"][row].as_py()

    return shared_tokens(list(keys), ids, positions, sequences)


def sibling_repeat(pieces: Sequence[SharedTokens], log_probs: Reals) -> Repeat | None:
    """One side's log-probs of the tokens that responses share; None where they are too few to measure its noise. A
    response that is there twice, with every number, says nothing and is left out.
    """
    parts = [
        part for part in pieces if not (part.are_all and np.array_equal(log_probs[part.first], log_probs[part.second]))
    ]
    if len(parts) < LEAST_RESPONSES or sum(part.first.size for part in parts) < LEAST_TOKENS:
        return None
    return _repeat_of_pieces(parts, log_probs)


def _repeat_of_pieces(pieces: Sequence[SharedTokens], log_probs: Reals) -> Repeat:
    sequences = Sequences.of_lengths([piece.first.size for piece in pieces], [piece.prompt for piece in pieces])
    first, second = (
        np.concatenate([log_probs[indices] for indices in each])
        for each in ([piece.first for piece in pieces], [piece.second for piece in pieces])
    )
    return Repeat(sequences, first, second)


def repeats_in_starts(data: PairData) -> dict[str, Repeat]:
    """`pi_starts`, `mu_starts`: what each side gives the tokens that the starts of two prompts share, equal ids behind
    equal ids, as a template makes them; empty where no two prompts share any.
    """
    start = data.prompt_start
    if start is None:
        return {}
    prompts, lengths = data.prompts_of_starts(START_TOKENS), start.sequences.lengths
    pieces = shared_tokens(
        [ids[0] for ids in prompts],
        lambda row: (prompts[row][:1], prompts[row][1:]),
        lambda row: np.arange(lengths[row]),
        start.sequences,
    )
    legs = {"pi_starts": start.log_pi, "mu_starts": start.log_mu}
    return {name: _repeat_of_pieces(pieces, leg) for name, leg in legs.items()} if pieces else {}


def repeat_of_one_side(rollouts: pa.Table, logprobs: Sequence[Reals]) -> Repeat | None:
    """`sibling_repeat` of a log that holds one side alone; logprobs: of each row, those of tokens that were not sampled
    too.
    """
    sampled = rollouts["sampled"].to_pylist()
    places = [
        np.flatnonzero(np.asarray(mask, dtype=bool) & is_usable(of_row))
        for mask, of_row in zip(sampled, logprobs, strict=True)
    ]
    rows = [row for row, each in enumerate(places) if each.size]
    if not rows:
        return None
    places = [places[row] for row in rows]
    prompts = rollouts["prompt_id"].take(pa.array(rows))
    clusters = np.unique(prompts.to_pylist(), return_inverse=True)[1]
    sequences = Sequences.of_lengths([each.size for each in places], clusters)
    pieces = _shared_tokens_of(rollouts.take(pa.array(rows)), places.__getitem__, sequences)
    flat = np.concatenate([logprobs[row][each] for row, each in zip(rows, places, strict=True)])
    return sibling_repeat(pieces, flat)


def _usable_leg(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """Usable log-probs by id, empty where the leg was not recorded."""
    return {
        row_id: values for row_id, values in _rows_of_responses(legs, name, key_of).items() if is_usable(values).all()
    }


def _rows_of_responses(legs: Legs, name: str, key_of: Mapping[str, int]) -> dict[str, Reals]:
    if not legs.path(name).exists():
        return {}
    table = legs.read(name, columns=["id", "ids_key", "logprobs"])
    rows = zip(table["id"].to_pylist(), table["ids_key"].to_pylist(), table["logprobs"].to_pylist(), strict=True)
    return {row_id: np.asarray(logprobs) for row_id, key, logprobs in rows if key_of.get(row_id) == key}


def _decoded_alone_rows(legs: Legs, mu: Side, key_of: Mapping[str, int]) -> dict[str, Reals]:
    """The log-probs of the first tokens, as far as decoding alone gives the same tokens, by id."""
    rows = _rows_of_responses(legs, mu.leg("decoded-alone"), key_of)
    lengths = {row_id: np.append(is_usable(values), False).argmin() for row_id, values in rows.items()}
    return {row_id: values[: lengths[row_id]] for row_id, values in rows.items()}


def share_decoded_alike(
    legs: Legs, mu: Side, pair: TokenPair, key_of: Mapping[str, int], level: float
) -> Estimate | None:
    """The share of responses whose first tokens are equal when decoded alone; None where none was decoded again."""
    alone_rows = _decoded_alone_rows(legs, mu, key_of)
    rows = [row for row, row_id in enumerate(key_of) if row_id in alone_rows]
    if not rows:
        return None
    sequences = Sequences.of_lengths(pair.sequences.lengths[rows], pair.sequences.clusters[rows])
    decode_rows = np.asarray([alone_rows[row_id].size for row_id in key_of if row_id in alone_rows])
    return Estimator(sequences, level).share(decode_rows >= np.minimum(sequences.lengths, DECODED_ALONE), "sequence")


def _repeat_of(first: dict[str, Reals], second: dict[str, Reals], cluster_of: dict[str, int]) -> Repeat | None:
    common_ids = [row_id for row_id in first if row_id in second and first[row_id].size == second[row_id].size]
    if not common_ids:
        return None
    sequences = Sequences.of_lengths(
        [first[row_id].size for row_id in common_ids], [cluster_of[row_id] for row_id in common_ids]
    )
    return Repeat(sequences, *(np.concatenate([leg[row_id] for row_id in common_ids]) for leg in (first, second)))


def full_vocabulary_of(
    legs: Legs, pi: Side, mu: Side, pair: TokenPair, ids: Sequence[str], level: float
) -> FullVocabularyCheck | str:
    """The full-vocabulary check on the pair's responses (`ids` in its order), or why there is none."""
    name = pi.full_vocabulary_leg(mu)
    if not legs.path(name).exists():
        return "no whole distributions were recorded"
    cluster_of = dict(zip(ids, pair.sequences.clusters.tolist(), strict=True))
    rows = [row for row in legs.read(name).to_pylist() if row["id"] in cluster_of]
    if not rows:
        return "no usable response has whole distributions"
    kl, tv, diff = (np.concatenate([np.asarray(row[name]) for row in rows]) for name in ("full_kl", "full_tv", "diff"))
    is_broken = ~np.isfinite([kl, tv, diff]).all(axis=0)
    if is_broken.any():
        return f"the whole distributions are not finite at {is_broken.sum()} of {is_broken.size} positions"
    sequences = Sequences.of_lengths([len(row["diff"]) for row in rows], [cluster_of[row["id"]] for row in rows])
    return full_vocabulary_check(sequences, diff, kl, tv, level)
