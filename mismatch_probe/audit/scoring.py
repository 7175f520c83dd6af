"""What a checkpoint, or a changed one, says of served tokens: which one it names, and how likely each is.

A sampler that adds Gumbel noise to the logits and takes the largest sum draws from their softmax [Maddison, Tarlow
and Minka 2014, NIPS]. With the noise of a seed known, the sampled token is a function of the logits [arXiv 2511.20621].
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from mismatch_probe.explain.fitting import Distribution, Ordered
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.passes import LoadedWeights
from mismatch_probe.records.sequences import LoggedResponse, TokenSequence
from mismatch_probe.stats.sequences import Floats, Ints

_Words = npt.NDArray[np.uint64]
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MOST_SEED: Final = 2**31


def step_seeds(seed: int, num_tokens: int) -> list[int]:
    """The seed of each token's noise in vLLM on a CPU: a request's generator gives one number a step."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, _MOST_SEED, (1,), generator=generator, dtype=torch.long) for _ in range(num_tokens)]
    return [int(number) for number in numbers]


def gumbel_noise(seeds: Sequence[int], vocab_size: int) -> Floats:
    """Noise [T, V] of the tokens with these seeds: SplitMix64 of seed and token id [Steele, Lea and Flood 2014,
    OOPSLA], as vLLM's kernel for CPUs has it in 0.32.
    """
    with np.errstate(over="ignore"):
        keys_T1 = _mix(np.asarray(seeds, dtype=np.uint64))[:, None]
        bits = _mix(keys_T1 + np.arange(1, vocab_size + 1, dtype=np.uint64) * _GAMMA) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_MIXED: Final = 1e-3
"""Of an alternative law, the share that is as declared: rounding moves a token over the edge of a cut."""
_MOST_FOR_KL: Final = 512
"""Tokens over which the KL of an alternative law is averaged."""


def logged_tokens(sequences: Sequence[TokenSequence], groups: Sequence[int]) -> LoggedTokens:
    """Served responses as `explain` reads those of a log, without log-probs; groups: the prompt of each."""
    responses = [
        LoggedResponse(
            where=sequence.id,
            prompt_token_ids=np.asarray(sequence.prompt_token_ids, dtype=np.int32),
            token_ids=np.asarray(sequence.token_ids, dtype=np.int32),
            sampled=np.ones(len(sequence.token_ids), dtype=np.bool_),
            group=str(group),
        )
        for sequence, group in zip(sequences, groups, strict=True)
    ]
    lengths = np.array([len(sequence.token_ids) for sequence in sequences])
    return LoggedTokens(
        responses=responses,
        sequences=list(sequences),
        lengths=lengths,
        rows=np.repeat(np.arange(len(sequences)), lengths),
        places=np.concatenate([np.arange(length) for length in lengths]),
        sampled=np.ones(int(lengths.sum()), dtype=np.bool_),
        temperature=np.full(int(lengths.sum()), np.nan),
        columns={},
    )


@dataclass(frozen=True)
class Prediction:
    """The tokens that a model names, each [T]; scores and distances in nats."""

    best_ids: Ints
    second_ids: Ints
    margins: Floats
    """By how much the best score is above the second one."""
    gaps: Floats
    """By how much the served token's score is below the best one; 0 where it is the best."""
    differences: Floats
    """Between the scaled logits of the best and the second token, without noise and cut."""

    @property
    def differs(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        return self.gaps > 0


def predict(
    weights: LoadedWeights, context: Context, law: Distribution | None, step_seeds: Sequence[int] | None
) -> Prediction:
    """The token that has the largest score at each position: the largest logit of greedy decoding (`law` is None), or
    the largest sum of log-prob and the noise of that step's seed among the tokens that the law keeps.
    """
    parts = []
    for chunk, logits_TV, targets_T in weights.logits(context, None):
        scaled_TV = logits_TV.double() / (1.0 if law is None else law.temperature or 1.0)
        scores_TV = scaled_TV.clone()
        if law is not None and step_seeds is not None:
            noise = gumbel_noise(step_seeds[chunk], logits_TV.shape[1])
            scores_TV += torch.from_numpy(noise).to(scores_TV)
        own_T = scores_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        if law is not None and law.is_cut:
            scores_TV = scores_TV.masked_fill(~_is_kept(scaled_TV, law), -torch.inf)
        best = scores_TV.topk(2, dim=-1)
        pair = scaled_TV.gather(-1, best.indices)
        parts.append(
            (
                best.indices[:, 0].cpu().numpy(),
                best.indices[:, 1].cpu().numpy(),
                (best.values[:, 0] - best.values[:, 1]).cpu().numpy(),
                torch.where(best.indices[:, 0] == targets_T, 0.0, (best.values[:, 0] - own_T).clamp(min=1e-9))
                .cpu()
                .numpy(),
                (pair[:, 0] - pair[:, 1]).cpu().numpy(),
            )
        )
    return Prediction(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class InverseTemperatures:
    """Of each served token [T]: between which inverse temperatures the noise names it, whatever is cut, and how far in
    nats the two scores that tie there move apart with one of inverse temperature.
    """

    low: Floats
    low_slope: Floats
    high: Floats
    high_slope: Floats


def inverse_temperatures(weights: LoadedWeights, context: Context, step_seeds: Sequence[int]) -> InverseTemperatures:
    """Where the sum of logit times inverse temperature and noise is the served token's: each other token bounds it on
    one side.
    """
    parts = []
    for chunk, logits_TV, targets_T in weights.logits(context, None):
        noise_TV = torch.from_numpy(gumbel_noise(step_seeds[chunk], logits_TV.shape[1])).to(logits_TV.device)
        ids_T1 = targets_T[:, None]
        ahead_TV = logits_TV.double().gather(-1, ids_T1) - logits_TV.double()
        bounds_TV = (noise_TV - noise_TV.gather(-1, ids_T1)) / ahead_TV
        low = bounds_TV.masked_fill(ahead_TV <= 0, 0.0).max(dim=-1, keepdim=True)
        high = bounds_TV.masked_fill(ahead_TV >= 0, torch.inf).min(dim=-1, keepdim=True)
        slopes = (ahead_TV.gather(-1, side.indices).abs() for side in (low, high))
        columns = (low.values.clamp(min=0), next(slopes), high.values, next(slopes))
        parts.append([column.squeeze(-1).cpu().numpy() for column in columns])
    return InverseTemperatures(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def pair_differences(
    weights: LoadedWeights, context: Context, prediction: Prediction, law: Distribution | None
) -> Floats:
    """Between the scaled logits of the two tokens that `prediction` has as best and second, by these weights [T]."""
    values = np.empty(len(prediction.best_ids))
    for chunk, logits_TV, _ in weights.logits(context, None):
        scaled_TV = logits_TV.double() / (1.0 if law is None else law.temperature or 1.0)
        ids_T2 = torch.from_numpy(np.stack([prediction.best_ids[chunk], prediction.second_ids[chunk]], axis=1))
        pair = scaled_TV.gather(-1, ids_T2.long().to(scaled_TV.device))
        values[chunk] = (pair[:, 0] - pair[:, 1]).cpu().numpy()
    return values


def _is_kept(scaled_TV: torch.Tensor, law: Distribution) -> torch.Tensor:
    logprobs_TV = torch.log_softmax(scaled_TV, dim=-1)
    order = Ordered.of(logprobs_TV, logprobs_TV.max(dim=-1).values)
    least_T1 = order.logprobs_TV.gather(-1, order.last_kept(law)[:, None])
    return logprobs_TV >= least_T1


@dataclass(frozen=True)
class Drawn:
    """Served tokens under the laws that they may have been drawn from, the first of which is as declared; nats."""

    log_probs: Floats
    """[K, T], of each law with a little of the first one mixed in."""
    kl: Floats
    """[K], of each law from the first one, a token; NaN where it departs in more than one setting."""
    first: Floats
    """[T], log-probs under the first law alone; where a token is outside its cut, the edge moves to it."""
    entropies: Floats
    variances: Floats
    """[T], of log p under the first law."""
    below: Floats
    """[T], the probability of all likelier tokens under the first law."""
    mass_before: Floats
    """[T], the same without its cut."""
    places: Ints
    """[T], of the token in the order of probability, from 0."""
    is_outside: "np.ndarray[Any, np.dtype[np.bool_]]"
    """[T], whether the first law's cut does not keep the token."""


def draw(weights: LoadedWeights, context: Context, laws: Sequence[Distribution]) -> Drawn:
    """Raises as `LoadedWeights.columns`."""
    parts: list[dict[str, np.ndarray[Any, Any]]] = []
    num_done = 0
    for _, logits_TV, targets_T in weights.logits(context, None):
        parts.append(_draw_chunk(logits_TV.double(), targets_T, laws, with_kl=num_done < _MOST_FOR_KL))
        num_done += len(targets_T)
    columns = {name: np.concatenate([part[name] for part in parts if name in part], axis=-1) for name in parts[0]}
    return Drawn(**(columns | {"kl": columns["kl"].mean(axis=1)}))


def _draw_chunk(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, laws: Sequence[Distribution], *, with_kl: bool
) -> dict[str, "np.ndarray[Any, Any]"]:
    claim = _Law.of(logits_TV, targets_T, laws[0].temperature or 1.0)
    first = claim.log_probs(laws[0])
    uncut_TV = claim.order.logprobs_TV
    last_T = claim.order.last_kept(laws[0])
    is_kept_TV = torch.arange(uncut_TV.shape[1], device=uncut_TV.device) <= last_T[:, None]
    log_mass_T1 = claim.order.mass_up_to(last_T).log()[:, None]
    log_p_TV = torch.where(is_kept_TV, uncut_TV - log_mass_T1, -torch.inf)
    weights_TV = log_p_TV.exp()
    finite_TV = torch.where(is_kept_TV, uncut_TV - log_mass_T1, 0.0)
    entropies = -(weights_TV * finite_TV).sum(dim=-1)
    variances = (weights_TV * finite_TV**2).sum(dim=-1) - entropies**2
    claim_mixed_TV = _mix_in(log_p_TV, uncut_TV)
    log_probs, kl = [], []
    by_temperature: dict[float, _Law] = {laws[0].temperature or 1.0: claim}
    for law in laws:
        temperature = law.temperature or 1.0
        if temperature not in by_temperature:
            by_temperature[temperature] = _Law.of(logits_TV, targets_T, temperature)
        own = by_temperature[temperature]
        is_inside_T = own.order.target_places_T <= own.order.last_kept(law)
        log_law_T = torch.where(is_inside_T, own.log_probs(law), -torch.inf)
        log_probs.append(_mix_in(log_law_T, claim.own_T))
        if with_kl and num_departures(law, laws[0]) > 1:
            kl.append(torch.full_like(claim.own_T, torch.nan))
        elif with_kl:
            order = own.order
            last = order.last_kept(law)
            inside_TV = torch.arange(uncut_TV.shape[1], device=uncut_TV.device) <= last[:, None]
            law_TV = torch.where(inside_TV, order.logprobs_TV - order.mass_up_to(last).log()[:, None], -torch.inf)
            mixed_TV = _mix_in(law_TV, uncut_TV)
            kl.append((mixed_TV.exp() * (mixed_TV - claim_mixed_TV)).nan_to_num(0.0).sum(dim=-1))
    own_mass_T = claim.own_T.exp()
    before_T = (claim.order.mass_up_to(claim.order.target_places_T) - own_mass_T).clamp(min=0)
    columns = {
        "log_probs": torch.stack(log_probs),
        "first": first,
        "entropies": entropies,
        "variances": variances.clamp(min=0),
        "below": before_T / log_mass_T1.squeeze(-1).exp(),
        "mass_before": before_T,
        "places": claim.order.target_places_T,
        "is_outside": claim.order.target_places_T > last_T,
    }
    if with_kl:
        columns["kl"] = torch.stack(kl)
    return {name: column.cpu().numpy() for name, column in columns.items()}


def num_departures(law: Distribution, claim: Distribution) -> int:
    """How many settings are others than declared."""
    names = ("temperature", "top_p", "top_k", "min_p")
    return sum(getattr(law, name) != getattr(claim, name) for name in names)


def _mix_in(log_law: torch.Tensor, log_said: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(log_law + float(np.log1p(-_MIXED)), log_said + float(np.log(_MIXED)))


@dataclass(frozen=True)
class _Law:
    """The vocabulary in the order of probability at a temperature, and the targets' log-probs [T]."""

    order: Ordered
    own_T: torch.Tensor

    @classmethod
    def of(cls, logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> "_Law":
        logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
        own_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        return cls(Ordered.of(logprobs_TV, own_T), own_T)

    def log_probs(self, law: Distribution) -> torch.Tensor:
        return self.own_T - self.order.log_kept_mass(law) if law.is_cut else self.own_T


@dataclass(frozen=True)
class Quantisation:
    """Weights of the decoder's linear layers rounded as weight-only quantisation does, to the nearest."""

    name: str
    levels: float
    """The largest number that is stored, in units of the scale."""
    group: int | None = None
    """Weights of a row that share a scale; None where all of them do."""
    is_float: bool = False
    """Whether E4M3 is stored, and whole numbers otherwise."""


QUANTISATIONS: Final = (
    Quantisation("int8 (a scale a row)", 127),
    Quantisation("fp8 E4M3 (a scale a row)", 448, is_float=True),
    Quantisation("int4 (groups of 32)", 7, group=32),
    Quantisation("int4 (groups of 128)", 7, group=128),
    Quantisation("int4 (a scale a row)", 7),
)


@contextmanager
def with_rounded_weights(model: PreTrainedModel, quantisation: Quantisation) -> Iterator[None]:
    """The model with rounded weights inside the block, but for embeddings and head; as before afterwards."""
    outside = {id(parameter) for module in _outer_modules(model) for parameter in module.parameters()}
    parameters = [
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) not in outside
    ]
    old_values = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = round_weight(parameter.data, quantisation)
        yield
    finally:
        for parameter, values in zip(parameters, old_values, strict=True):
            parameter.data = values


def _outer_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [module for module in modules if isinstance(module, torch.nn.Module)]


def round_weight(weight: torch.Tensor, quantisation: Quantisation) -> torch.Tensor:
    """A weight [O, I], each row or group of a row scaled by its largest number."""
    rows = weight.float()
    size = quantisation.group
    grouped = rows.reshape(-1, size) if size is not None and rows.shape[1] % size == 0 else rows
    scale = (grouped.abs().amax(dim=1, keepdim=True) / quantisation.levels).clamp(min=1e-12)
    units = grouped / scale
    numbers = units.to(torch.float8_e4m3fn).float() if quantisation.is_float else units.round()
    return (numbers * scale).reshape(rows.shape).to(weight.dtype)
