"""The same few tokens through both sides after every sync: does the engine answer as the weights it was sent do?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

from mismatch_probe.arrays import ArrayLike, Layout, is_unrecorded
from mismatch_probe.errors import UsageError
from mismatch_probe.guards.sums import Metrics
from mismatch_probe.stats.metrics import k3_terms
from mismatch_probe.stats.sequences import MOST_ROUNDED_UP, Floats, is_usable

LogProbPair = tuple[Floats, Floats]
"""log pi and log mu [T]."""
SavedPair = Mapping[str, list[float | str]]
"""Both, a number that is not finite by its name."""

SHIFT: Final = "update/policy_shift_k3"
SHIFT_FARTHEST: Final = "update/policy_shift_farthest"

_FARTHEST_SHARE: Final = 0.1
_LEAST_DOUBT: Final = 1e-3
"""1 - p of a token; a log-prob closer to 0 has no digits in FP32 for the error of a 16-bit logit."""
_SMALLEST_K3: Final = 1e-12
"""Nats a token; FP32 engines agree to about this, and two equal ones to 0."""
_MOVED: Final = 1e-3
"""Of the first sync's k3: a smaller shift of pi may vanish in the engine's rounding."""
_LEFT_BEHIND: Final = 0.1
"""Of how far pi moved: an engine that did not go along is as far from it, but for its rounding."""


@dataclass(frozen=True)
class Probe:
    """Log-probs of the same few tokens at every step, under pi and under the engine that was just sent pi's weights.

    Arrays as in `Batch`, nats. A few hundred tokens of earlier responses do.

    Raises:
        UsageError: as `tokens`.
    """

    log_pi: ArrayLike
    """Log-probs of the tokens under pi, nats."""
    log_mu: ArrayLike
    """Those of the same tokens under the engine."""
    mask: ArrayLike | bool | None = None
    """1 where a token counts, or True where every row is full, as in `Batch`."""

    def __post_init__(self) -> None:
        self.tokens()

    def tokens(self) -> LogProbPair:
        """log pi and log mu [T]; NaN where one is missing or above 0, and everywhere in a side that was not recorded.

        Raises:
            UsageError: they are not of the same tokens, or no token is given.
        """
        layout = Layout.of(self.log_pi, self.mask, "probe log_pi", self.log_mu)
        if not layout.is_counted.any():
            raise UsageError("the probe holds no token: give some of earlier responses, the same at every step")
        return self._side(layout, self.log_pi, "probe log_pi"), self._side(layout, self.log_mu, "probe log_mu")

    def _side(self, layout: Layout, values: ArrayLike, name: str) -> Floats:
        log_probs = layout.log_probs(values, name, "probe log_pi")
        usable = is_usable(log_probs) & (log_probs <= MOST_ROUNDED_UP)
        return np.where(usable & ~is_unrecorded(log_probs), log_probs, np.nan)


@dataclass
class EngineProbes:
    """The earlier probes of one engine."""

    last: LogProbPair | None = None
    """Of the step before."""
    verified: LogProbPair | None = None
    """Of the last one whose answer was not stale."""
    canary_k3: float | None = None

    def take(self, probe: Probe, *, may_be_stale: bool = True) -> Metrics:
        """Metrics of a probe after the weights were sent.

        `sync/engine_unchanged` is 1 where the engine answers bit for bit as it did before, although pi has moved since,
        and moved away from it: where pi is back at the engine, it was pi's scores that were wrong before.
        may_be_stale: False where the weights sent are those of the last answer that was not stale.
        `sync/probe_k3` is KL(mu, pi) in nats a token on the probe (k3 estimator), with its ratio to the first probe's,
        and `sync/probe_logit_error` what it takes of logits. `update/policy_shift_k3` is the KL between pi before and
        after the last update, and `update/policy_shift_farthest` what the farthest tenth of the tokens makes of that.
        """
        log_pi, log_mu = probe.tokens()
        columns = log_pi, log_mu
        if self.last is not None and self.last[0].size != log_pi.size:
            self.last = self.verified = None
        last, last_verified = self.last or columns, self.verified or columns
        probe_k3 = k3(log_pi - log_mu)
        if self.canary_k3 is None and math.isfinite(probe_k3):
            self.canary_k3 = probe_k3
        canary_k3 = math.nan if self.canary_k3 is None else self.canary_k3
        shift = k3(log_pi - last_verified[0])
        is_apart = shift > _MOVED * canary_k3 and probe_k3 > _LEFT_BEHIND * shift
        is_stale = bool(may_be_stale and is_apart and np.array_equal(log_mu, last_verified[1]))
        self.last, self.verified = columns, last_verified if is_stale else columns
        return {
            "sync/engine_unchanged": float(is_stale),
            "sync/probe_k3": probe_k3,
            "sync/probe_logit_error": logit_error(log_pi, log_mu),
            "sync/probe_k3_canary_ratio": probe_k3 / max(canary_k3, _SMALLEST_K3),
            SHIFT: k3(log_pi - last[0]),
            SHIFT_FARTHEST: of_farthest_tokens(log_pi - last[0]),
        }

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"last": _pair_as_json(self.last), "verified": _pair_as_json(self.verified), "canary_k3": self.canary_k3}

    @classmethod
    def of_state(cls, state: Mapping[str, Any] | None) -> Self:
        if state is None:
            return cls()
        return cls(_from_json(state["last"]), _from_json(state["verified"]), state["canary_k3"])


@dataclass
class ProbedEngines:
    """The probes of each engine, in their order: one of several engines that is stale shows in no sum over all."""

    engines: list[EngineProbes] = field(default_factory=list)

    def take(self, probes: Sequence[Probe]) -> Metrics:
        """As `Probed.take`, of each metric the largest; NaN where one is."""
        for probe in probes:
            probe.tokens()
        if len(probes) != len(self.engines):
            self.engines = [EngineProbes() for _ in probes]
        metrics_of_engines = [engine.take(probe) for engine, probe in zip(self.engines, probes, strict=True)]
        return {
            name: float(np.max([metrics[name] for metrics in metrics_of_engines])) for name in metrics_of_engines[0]
        }

    def state(self) -> list[dict[str, Any]]:
        """JSON values."""
        return [engine.state() for engine in self.engines]

    @classmethod
    def of_state(cls, state: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None) -> Self:
        """A version before knew one engine."""
        engines = [state] if isinstance(state, Mapping) else state or ()
        return cls([EngineProbes.of_state(engine) for engine in engines])


def _pair_as_json(sides: LogProbPair | None) -> SavedPair | None:
    if sides is None:
        return None
    log_pi, log_mu = ([value if math.isfinite(value) else str(value) for value in side.tolist()] for side in sides)
    return {"log_pi": log_pi, "log_mu": log_mu}


def _from_json(pair: SavedPair | None) -> LogProbPair | None:
    if pair is None:
        return None
    return np.array(pair["log_pi"], dtype=np.float64), np.array(pair["log_mu"], dtype=np.float64)


def k3(log_ratio: Floats) -> float:
    """mean(e^x - x - 1), nats a token [Schulman 2020, Approximating KL divergence]; NaN stays NaN."""
    return float(k3_terms(log_ratio).mean())


def of_farthest_tokens(log_ratio: Floats) -> float:
    """How much of `k3` the farthest tenth of the tokens makes: k3 less the mean of the others' terms, nats a token.

    Of few tokens two that a good update moves far make nearly all of it. NaN where a term is no number.
    """
    terms = k3_terms(log_ratio)
    if np.isnan(terms).any():
        return math.nan
    others = np.sort(terms)[: terms.size - math.ceil(_FARTHEST_SHARE * terms.size)]
    return float(terms.mean() - (others.mean() if others.size else 0.0))


def logit_error(log_pi: Floats, log_mu: Floats) -> float:
    """Median of abs(d) / (1 - pi), nats; NaN stays NaN.

    An error e of a token's logit against the others' moves its log-prob by (1 - p) e, to first order. So this is the
    error of logits, which a format sets: unlike d it does not follow how sure the policy is. Wrong weights move every
    token's; a router that sends a token to another expert moves few, which a median does not see.
    """
    return float(np.median(np.abs(log_pi - log_mu) / np.maximum(-np.expm1(log_pi), _LEAST_DOUBT)))
