"""The same few tokens through both sides after every sync: does the engine hold what it was sent?"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.weight_digests import as_numbers, weight_digest
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.divergence import k3_terms
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import largest
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.weight_arrival import WeightArrival

Metrics = dict[str, float]

_SMALLEST_K3: Final = 1e-12
"""Nats a token; FP32 engines agree to about this, and two equal ones to 0."""
_LEAST_DOUBT: Final = 1e-3
"""1 - p of a token; a log-prob closer to 0 has no digits in FP32 for the error of a 16-bit logit."""
_MOVED: Final = 1e-3
"""Of the first sync's k3: a smaller shift of pi may vanish in the engine's rounding."""


@dataclass(frozen=True)
class Held:
    """Digests of what was sent, and what both sides said of the probe tokens afterwards: log-probs [T], nats."""

    digests: tuple[int, ...]
    log_mu: Floats
    log_pi: Floats


class WeightSync:
    """Sends pi's weights to the engine and looks whether they arrived."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        dtype: Dtype,
        probe: Sequence[TokenSequence],
        ranks_an_engine: int = 1,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._arrival = WeightArrival(engine, ranks_an_engine)
        self._dtype = dtype
        self._probe = list(probe)
        self._sent: dict[str, int] = {}
        self._last: Held | None = None
        self._verified: Held | None = None
        self._canary_k3: float | None = None

    def __call__(self) -> Metrics:
        """`send`, then `verify`."""
        self.send()
        return self.verify()

    def send(self) -> None:
        """Give the engine every weight."""
        self._arrival.look()
        digests: dict[str, torch.Tensor] = {}
        weights = self._digested(digests)
        self._engine.update_weights(weights)
        deque(weights, maxlen=0)
        self._sent = dict(zip(digests, as_numbers(list(digests.values())), strict=True))

    def verify(self) -> Metrics:
        """Score the probe on both sides after a `send`.

        `sync/engine_unchanged` is 1 where the engine answers bit for bit as it did for other weights, although pi has
        moved since. `sync/probe_k3` is KL(mu, pi) in nats a token on the probe (k3 estimator), with its ratio to the
        first sync's, and `sync/probe_logit_error` what it takes of logits. `update/policy_shift_k3` is the KL between
        pi before and after the last update. The other metrics are those of `WeightArrival.check`.
        """
        log_mu = np.concatenate([scores.logprobs for scores in self._engine.replay(self._probe)]).astype(np.float64)
        now = Held(tuple(self._sent.values()), log_mu, self._log_pi())
        probe_k3 = k3(now.log_pi - now.log_mu)
        last, verified = self._last or now, self._verified or now
        if self._canary_k3 is None:
            self._canary_k3 = probe_k3
        moved = k3(now.log_pi - verified.log_pi) > _MOVED * self._canary_k3
        stale = now.digests != verified.digests and np.array_equal(now.log_mu, verified.log_mu) and moved
        self._last, self._verified = now, verified if stale else now
        return {
            **self._arrival.check(self._sent),
            "sync/engine_unchanged": largest(stale),
            "sync/probe_k3": largest(probe_k3),
            "sync/probe_logit_error": largest(logit_error(now.log_pi, now.log_mu)),
            "sync/probe_k3_canary_ratio": largest(probe_k3 / max(self._canary_k3, _SMALLEST_K3)),
            "update/policy_shift_k3": largest(k3(now.log_pi - last.log_pi)),
        }

    def state(self) -> dict[str, Any]:
        """What later syncs are compared with, as JSON values."""
        held = {name: _as_json(value) for name, value in (("last", self._last), ("verified", self._verified))}
        return {
            **held,
            "canary_k3": self._canary_k3,
            "probe": [asdict(sequence) for sequence in self._probe],
            "comparable": sorted(self._arrival.comparable),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave, on its probe: an engine started anew may have sampled another."""
        self._probe = [TokenSequence(**sequence) for sequence in state["probe"]]
        self._last, self._verified = _from_json(state["last"]), _from_json(state["verified"])
        self._canary_k3 = state["canary_k3"]
        self._arrival.comparable |= set(state.get("comparable", ()))

    def _digested(self, digests: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they are sent, and the digest of each one."""
        for name, tensor in self._policy.weights(self._dtype):
            digests[name] = weight_digest(tensor)
            yield name, tensor

    def _log_pi(self) -> Floats:
        with torch.no_grad(), self._policy.computing():
            logprobs_T, _ = self._policy.logprobs(self._probe)
        return logprobs_T.double().cpu().numpy()


def _as_json(held: Held | None) -> dict[str, Any] | None:
    if held is None:
        return None
    return {
        "digests": list(held.digests),
        "log_mu": held.log_mu.tolist(),
        "log_pi": held.log_pi.tolist(),
    }


def _from_json(saved: Mapping[str, Any] | None) -> Held | None:
    if saved is None:
        return None
    return Held(tuple(saved.get("digests", ())), np.array(saved["log_mu"]), np.array(saved["log_pi"]))


def k3(log_ratio: Floats) -> float:
    """mean(e^x - x - 1), nats a token [Schulman 2020, Approximating KL divergence]; NaN stays NaN."""
    return float(k3_terms(log_ratio).mean())


def logit_error(log_pi: Floats, log_mu: Floats) -> float:
    """Median of abs(d) / (1 - pi), nats; NaN stays NaN.

    An error e of a token's logit against the others' moves its log-prob by (1 - p) e, to first order. So this is the
    error of logits, which a format sets: unlike d it does not follow how sure the policy is. Wrong weights move every
    token's; a router that sends a token to another expert moves few, which a median does not see.
    """
    return float(np.median(np.abs(log_pi - log_mu) / np.maximum(-np.expm1(log_pi), _LEAST_DOUBT)))
