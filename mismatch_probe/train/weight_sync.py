"""The same few tokens through both sides after every sync: does the engine hold what it was sent?"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.weight_digests import as_numbers, weight_digest
from mismatch_probe.guards.probe import Probe, Probed
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import largest
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.weight_arrival import WeightArrival

Metrics = dict[str, float]


class WeightSync:
    """Sends pi's weights to the engine and looks whether they arrived.

    sent_digest_seconds, held_digest_seconds: of the last `send` and `verify`, what it took to tell weights apart.
    """

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
        self._probed = Probed()
        self._sends = 0
        self.sent_digest_seconds = self.held_digest_seconds = 0.0

    def __call__(self) -> Metrics:
        """`send`, then `verify`."""
        self.send()
        return self.verify()

    def send(self, *, digested: bool = True) -> None:
        """Give the engine every weight. Unless `digested`, none of this is compared, and `verify` must not follow."""
        self.sent_digest_seconds = self.held_digest_seconds = 0.0
        self._sends += 1
        if not digested:
            weights = self._policy.weights(self._dtype)
            self._engine.update_weights(weights)
            deque(weights, maxlen=0)
            return
        self._arrival.look()
        digests: dict[str, torch.Tensor] = {}
        weights = self._digested(digests)
        self._engine.update_weights(weights)
        deque(weights, maxlen=0)
        begun = time.perf_counter()
        self._sent = dict(zip(digests, as_numbers(list(digests.values())), strict=True))
        self.sent_digest_seconds += time.perf_counter() - begun

    def verify(self) -> Metrics:
        """Score the probe on both sides after a `send`: metrics of `Probed.take`, each engine's largest, and of
        `WeightArrival.check`. Of an engine that scores no given tokens, those that pi alone says. How far the policy
        moved is of one send, on average over those since the last `verify`.
        """
        log_pi = self._log_pi()
        probed = self._probed.take(Probe(log_pi, self._log_mu(log_pi.size)))
        if not self._engine.scores_given_tokens:
            probed = {name: value for name, value in probed.items() if not name.startswith("sync/")}
        probed["update/policy_shift_k3"] /= max(1, self._sends)
        self._sends = 0
        begun = time.perf_counter()
        arrived = self._arrival.check(self._sent)
        self.held_digest_seconds = time.perf_counter() - begun
        return {**arrived, **{name: largest(value) for name, value in probed.items()}}

    def state(self) -> dict[str, Any]:
        """What later syncs are compared with, as JSON values."""
        return {
            **self._probed.state(),
            "probe": [asdict(sequence) for sequence in self._probe],
            "comparable": sorted(self._arrival.comparable),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave, on its probe: an engine started anew may have sampled another."""
        self._probe = [TokenSequence(**sequence) for sequence in state["probe"]]
        self._probed = Probed.of_state(state)
        self._arrival.comparable |= set(state.get("comparable", ()))

    def _digested(self, digests: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they are sent, and the digest of each one."""
        for name, tensor in self._policy.weights(self._dtype):
            begun = time.perf_counter()
            digests[name] = weight_digest(tensor)
            self.sent_digest_seconds += time.perf_counter() - begun
            yield name, tensor

    def _log_mu(self, num_tokens: int) -> Floats:
        """[T] in nats; NaN of an engine that scores no given tokens."""
        if not self._engine.scores_given_tokens:
            return np.full(num_tokens, np.nan)
        return np.concatenate([scores.logprobs for scores in self._engine.replay(self._probe)])

    def _log_pi(self) -> Floats:
        with torch.no_grad(), self._policy.computing():
            logprobs_T, _ = self._policy.logprobs(self._probe)
        return logprobs_T.double().cpu().numpy()
