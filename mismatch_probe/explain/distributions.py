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
    columns: list[torch.Tensor] = [torch.empty(0)] * len(cuts)
    for temperature in dict.fromkeys(cut.temperature for cut in cuts):
        alike = [number for number, cut in enumerate(cuts) if cut.temperature == temperature]
        logprobs_TV = torch.log_softmax(logits_TV / temperatures_KT[alike[0]][:, None], dim=-1)
        own_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
        ordered = Ordered.of(logprobs_TV, own_T) if any(cuts[number].is_cut for number in alike) else None
        for number in alike:
            is_cut = ordered is not None and cuts[number].is_cut
            columns[number] = own_T - ordered.log_kept_mass(cuts[number]) if ordered and is_cut else own_T
    return torch.stack(columns)


@dataclass(frozen=True)
class Ordered:
    """Log-probs from the likeliest on [T, V], the probability of all up to each, and where the target stands [T]."""

    logprobs_TV: torch.Tensor
    mass_TV: torch.Tensor
    target_places_T: torch.Tensor

    @classmethod
    def of(cls, logprobs_TV: torch.Tensor, own_T: torch.Tensor) -> "Ordered":
        ordered_TV = logprobs_TV.sort(dim=-1, descending=True).values
        places_T = torch.searchsorted(-ordered_TV, -own_T[:, None], right=True).squeeze(-1) - 1
        return cls(ordered_TV, ordered_TV.exp().cumsum(dim=-1), places_T)

    def log_kept_mass(self, cut: Distribution) -> torch.Tensor:
        """Log of the probability that the kept tokens have together [T]."""
        size = self.logprobs_TV.shape[1]
        last_T = torch.full_like(self.target_places_T, min(cut.top_k or size, size) - 1)
        if cut.min_p > 0:
            least_T1 = self.logprobs_TV[:, :1] + float(np.log(cut.min_p))
            last_T = last_T.minimum(torch.searchsorted(-self.logprobs_TV, -least_T1, right=True).squeeze(-1) - 1)
        if cut.top_p < 1:
            enough_T1 = cut.top_p * self._mass(last_T)[:, None]
            last_T = last_T.minimum(torch.searchsorted(self.mass_TV, enough_T1).squeeze(-1))
        return self._mass(last_T.maximum(self.target_places_T)).log()

    def _mass(self, last_T: torch.Tensor) -> torch.Tensor:
        return self.mass_TV.gather(-1, last_T[:, None]).squeeze(-1)


def log_normalisers(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exp(logits / T) at each of INVERSE_TEMPERATURES [G, T]."""
    return torch.stack([torch.logsumexp(logits_TV * float(inverse), dim=-1) for inverse in INVERSE_TEMPERATURES])


def curve(own_logits: Floats, normalisers_GT: Floats) -> TemperatureCurve:
    return TemperatureCurve(own_logits, CubicSpline(INVERSE_TEMPERATURES, normalisers_GT, axis=0))
