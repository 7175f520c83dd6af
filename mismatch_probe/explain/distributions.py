"""From logits to log-probs under many sampling settings at once: one head, one sort, nothing kept but the answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from scipy.interpolate import CubicSpline

from mismatch_probe.config.explain import DeclaredPolicy
from mismatch_probe.explain.tokens import Floats

_CHUNK_BYTES: Final = 128 * 2**20
_COPIES: Final = 6
"""Arrays as large as the logits that exist at once."""
INVERSE_TEMPERATURES: Final = np.linspace(1 / 4, 4, 76)


@dataclass(frozen=True)
class Distribution:
    """What is done to logits: divided by the temperature, cut by min-p, top-k and top-p in this order, normalised.

    temperature: None is what the log says of each response, where it says several, and 1 where it says nothing.
    """

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def declared(cls, policy: DeclaredPolicy, logged: Floats) -> "Distribution":
        """logged: the temperature that the log says of each token [T], NaN where none."""
        said = np.unique(np.where(np.isfinite(logged), logged, 1.0))
        temperature = float(said[0]) if policy.temperature is None and len(said) == 1 else policy.temperature
        return cls(temperature, policy.top_p, policy.top_k, policy.min_p)

    @property
    def is_cut(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def uncut(self) -> "Distribution":
        return replace(self, top_p=1.0, top_k=0, min_p=0.0)

    def temperatures(self, logged: Floats) -> Floats:
        """Of each token [T]."""
        if self.temperature is not None:
            return np.full_like(logged, self.temperature)
        return np.where(np.isfinite(logged), logged, 1.0)


@dataclass(frozen=True)
class TemperatureCurve:
    """Log-probs of tokens [T] at any temperature from 1/4 to 4: their own logits, and the splines of log Z(1/T)."""

    own_logits: Floats
    log_normalisers: CubicSpline

    def at(self, temperature: float) -> Floats:
        logits: Floats = self.own_logits / temperature - self.log_normalisers(1 / temperature)
        return logits


def chunk_of_tokens(vocab_size: int) -> int:
    """How many tokens' logits are held at once."""
    return max(1, _CHUNK_BYTES // (vocab_size * 4 * _COPIES))


def log_probs(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, temperatures_KT: torch.Tensor, cuts: Sequence[Distribution]
) -> torch.Tensor:
    """Log-probs of the targets under each of K distributions [K, T]; a target is never cut away itself.

    A token that was sampled was not cut: where rounding moves it over the edge, the edge moves with it.
    """
    columns = []
    for temperature_T, cut in zip(temperatures_KT, cuts, strict=True):
        scaled_TV = torch.log_softmax(logits_TV / temperature_T[:, None], dim=-1)
        own_T = scaled_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        columns.append(own_T - _log_kept_mass(scaled_TV, own_T, cut) if cut.is_cut else own_T)
    return torch.stack(columns)


def _log_kept_mass(logprobs_TV: torch.Tensor, own_T: torch.Tensor, cut: Distribution) -> torch.Tensor:
    """Log of the probability that the kept tokens have together [T]."""
    ordered_TV = logprobs_TV.sort(dim=-1, descending=True).values
    kept_TV = torch.ones_like(ordered_TV, dtype=torch.bool)
    if cut.min_p > 0:
        kept_TV &= ordered_TV >= ordered_TV[:, :1] + float(np.log(cut.min_p))
    if cut.top_k > 0:
        kept_TV[:, cut.top_k :] = False
    if cut.top_p < 1:
        probabilities_TV = torch.where(kept_TV, ordered_TV.exp(), 0.0)
        mass_T1 = probabilities_TV.sum(dim=-1, keepdim=True)
        before_TV = probabilities_TV.cumsum(dim=-1) - probabilities_TV
        kept_TV &= before_TV < cut.top_p * mass_T1
    kept_TV |= ordered_TV >= own_T[:, None]
    return torch.logsumexp(ordered_TV.masked_fill(~kept_TV, -torch.inf), dim=-1)


def log_normalisers(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exp(logits / T) at each of INVERSE_TEMPERATURES [G, T]."""
    return torch.stack([torch.logsumexp(logits_TV * float(inverse), dim=-1) for inverse in INVERSE_TEMPERATURES])


def curve(own_logits: Floats, normalisers_GT: Floats) -> TemperatureCurve:
    return TemperatureCurve(own_logits, CubicSpline(INVERSE_TEMPERATURES, normalisers_GT, axis=0))
