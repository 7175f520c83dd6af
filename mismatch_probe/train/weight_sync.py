"""The check after every sync: every weight has arrived, and the engine answers as these weights do."""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

import numpy as np
import torch

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, HeldWeight
from mismatch_probe.engines.weight_digests import as_numbers, weight_digest
from mismatch_probe.guards.probe import SHIFT, SHIFT_FARTHEST, EngineProbes, Probe
from mismatch_probe.records.sequences import EncodedPrompt, SampleRequest, TokenSequence
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import gather, largest
from mismatch_probe.train.policy import Policy

ArrivalMetrics = dict[str, float]
Digests = tuple[int, ...]

_MAX_NAMES: Final = 5
NUM_DRAWS: Final = 64
"""Tokens drawn after a sync."""
_SMALLEST_ERROR: Final = 1e-9
_CONTEXT_TOKENS: Final = 16
"""The longest context that they are drawn behind."""

logger = logging.getLogger(__name__)


@dataclass
class _WeightDigests:
    """The digests of one weight of one engine."""

    digests: Digests
    """The digest of each worker."""
    took: Digests | None = None
    """The digests of the tensors that the weight was last made from."""


@dataclass
class WeightArrival:
    """Compares the weights of the engine with those that were sent, after each sync."""

    engine: Engine
    ranks_an_engine: int = 1
    comparable: set[str] = field(default_factory=set)
    """The weights that once had exactly the digests that were sent."""
    _earlier_digests: dict[tuple[int, str], _WeightDigests] = field(default_factory=dict)
    _has_warned: bool = False

    def look(self) -> None:
        """Record the digests of the engine's weights before the first sync, as it loaded them from the checkpoint."""
        if not self._earlier_digests:
            for place, engine in enumerate(self._read_digests(())):
                for name, workers in engine.items():
                    self._earlier_digests[place, name] = _WeightDigests(_worker_digests(workers))

    def check(self, sent_digests: Mapping[str, int]) -> ArrivalMetrics:
        """Compare the engine's weights after the tensors with these digests were sent.

        `sync/weights_unchanged` counts the engine's weights that did not change although other numbers were sent.
        `sync/weights_other` counts the other weights whose numbers are not those that were sent.
        `sync/weights_compared` is the share of the engine's numbers that can be compared. An engine that cannot report
        its weights gives none of these metrics.
        """
        unchanged_names, other, sizes = set(), set(), dict[str, int]()
        for place, engine in enumerate(self._read_digests(list(sent_digests))):
            for name, workers in engine.items():
                digests = self._earlier_digests.setdefault((place, name), _WeightDigests(_worker_digests(workers)))
                parts = tuple(sent_digests[part] for part in workers[0].made_of)
                arrival = _holds_sent_tensors(_worker_digests(workers), workers[0], sent_digests)
                if arrival or _holds_sent_tensors(digests.digests, workers[0], sent_digests):
                    self.comparable.add(name)
                if not arrival and digests.took not in (None, parts) and digests.digests == _worker_digests(workers):
                    unchanged_names.add(name)
                else:
                    digests.took = parts
                    if name in self.comparable and not arrival:
                        other.add(name)
                digests.digests = _worker_digests(workers)
                sizes[name] = sum(worker.num_elements for worker in workers)
        if not sizes:
            return {}
        if not self._has_warned:
            _warn_of_weights("cannot be compared with what is sent, number by number", sizes.keys() - self.comparable)
            self._has_warned = True
        _warn_of_weights("hold what they held before other numbers were sent", unchanged_names)
        _warn_of_weights("hold other numbers than were sent", other - unchanged_names)
        num_comparable = sum(size for name, size in sizes.items() if name in self.comparable)
        return {
            "sync/weights_unchanged": float(len(unchanged_names)),
            "sync/weights_other": float(len(other - unchanged_names)),
            "sync/weights_compared": num_comparable / sum(sizes.values()),
        }

    def _read_digests(self, names: Sequence[str]) -> list[dict[str, list[HeldWeight]]]:
        """For every engine, each weight on each worker that has it."""
        ranks = gather([self.engine.held_weights(names)])
        engines = []
        for start in range(0, len(ranks), self.ranks_an_engine):
            workers = [worker for rank in ranks[start : start + self.ranks_an_engine] for worker in rank]
            weight_names = dict.fromkeys(name for worker in workers for name in worker)
            engines.append({name: [worker[name] for worker in workers if name in worker] for name in weight_names})
        return engines


def _worker_digests(workers: Sequence[HeldWeight]) -> Digests:
    return tuple(worker.digest for worker in workers)


def _holds_sent_tensors(digests: Digests, weight: HeldWeight, sent_digests: Mapping[str, int]) -> bool:
    """Whether all workers together, or each of them, contain the tensors that the weight is made of."""
    if not weight.made_of:
        return False
    with_copies = sum(copies * sent_digests[name] for name, copies in weight.made_of.items())
    plain_sum = sum(sent_digests[name] for name in weight.made_of)
    return sum(digests) == with_copies or all(digest == plain_sum for digest in digests)


def _warn_of_weights(what: str, names: set[str]) -> None:
    if names:
        names_in_words = ", ".join(sorted(names)[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        logger.warning("%d of the engine's weights %s: %s", len(names), what, names_in_words)


Metrics = dict[str, float]


@dataclass
class Draws:
    """Single tokens that the engine draws behind one context where log pi varies most.

    Most tokens of a response are nearly sure and say little of how they were sampled; as many of these say much: a
    hidden temperature T moves the mean of log pi by (1/T - 1) times its variance, to first order.
    """

    engine: Engine
    policy: Policy
    sampling: SamplingSettings
    context: EncodedPrompt
    seed: int
    num_drawn: int = 0

    @classmethod
    def of_prompts(
        cls, engine: Engine, policy: Policy, sampling: SamplingSettings, prompts: Sequence[EncodedPrompt], seed: int
    ) -> Self:
        """The context is the start of a prompt behind which the variance of log pi is largest."""
        one_token = sampling.model_copy(update={"max_new_tokens": 1})
        return cls(engine, policy, one_token, widest_context(policy, prompts), seed)

    def take(self) -> Metrics:
        """`sync/draw_surprise_mean`, the mean of log pi + entropy over fresh draws, nats, which is 0 in expectation for
        tokens drawn from pi; `sync/draw_surprise_error`, its standard error. Of the engine that is farthest from 0.
        """
        first = self.num_drawn
        self.num_drawn += NUM_DRAWS
        requests = [
            SampleRequest(f"draw/{number}", self.context, (self.seed + number) % 2**31)
            for number in range(first, first + NUM_DRAWS)
        ]
        surprise_T, variance_T = self.policy.surprises(
            [response.sequence for response in self.engine.sample(requests, self.sampling)]
        )
        own = float(surprise_T.mean()), math.sqrt(variance_T.sum()) / len(variance_T)
        mean, error = max(gather([own]), key=lambda engine: abs(engine[0]) / max(engine[1], _SMALLEST_ERROR))
        return {"sync/draw_surprise_mean": mean, "sync/draw_surprise_error": error}


def widest_context(policy: Policy, prompts: Sequence[EncodedPrompt]) -> EncodedPrompt:
    """The start of a prompt behind which the variance of log pi is largest."""
    starts = [prompt.token_ids[:_CONTEXT_TOKENS] for prompt in prompts]
    sequences = [TokenSequence("context", ids[:1], [*ids[1:], ids[0]]) for ids in starts]
    _, variance_T = policy.surprises(sequences)
    contexts = [ids[:length] for ids in starts for length in range(1, len(ids) + 1)]
    return EncodedPrompt("context", contexts[int(variance_T.argmax())], text="")


class WeightSync:
    """Sends pi's weights to the engine and checks that they arrived.

    `sent_digest_seconds` and `held_digest_seconds` are the seconds of the digests in the last `send` and `verify`.
    """

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        dtype: Dtype,
        probe: Sequence[TokenSequence],
        ranks_an_engine: int = 1,
        draws: Draws | None = None,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._arrival = WeightArrival(engine, ranks_an_engine)
        self._dtype = dtype
        self._probe = list(probe)
        self._draws = draws
        self._sent_digests: dict[str, int] = {}
        self._verified_digests: dict[str, int] = {}
        """Of the weights behind the engine's last answer that was not stale."""
        self._probes = EngineProbes()
        self._sends = 0
        self.sent_digest_seconds = self.held_digest_seconds = 0.0

    def __call__(self) -> Metrics:
        """`send`, then `verify`."""
        self.send()
        return self.verify()

    def send(self, *, with_digests: bool = True) -> None:
        """Send the engine every weight; without `with_digests` nothing is compared, and `verify` must not follow."""
        self.sent_digest_seconds = self.held_digest_seconds = 0.0
        self._sends += 1
        if not with_digests:
            weights = self._policy.weights(self._dtype)
            self._engine.update_weights(weights)
            deque(weights, maxlen=0)
            return
        self._arrival.look()
        digests: dict[str, torch.Tensor] = {}
        weights = self._with_digests(digests)
        self._engine.update_weights(weights)
        deque(weights, maxlen=0)
        start = time.perf_counter()
        self._sent_digests = dict(zip(digests, as_numbers(list(digests.values())), strict=True))
        self.sent_digest_seconds += time.perf_counter() - start

    def verify(self) -> Metrics:
        """Score the probe on both sides after a `send`: the metrics of `EngineProbes.take`, `WeightArrival.check` and
        `Draws.take`.

        Each metric is the largest of all engines. An engine that scores no given tokens leaves those of pi alone. The
        movement of the policy is the average over the sends since the last `verify`.
        """
        log_pi = self._probe_log_pi()
        probe = Probe(log_pi, self._probe_log_mu(log_pi.size))
        metrics = self._probes.take(probe, may_be_stale=self._sent_digests != self._verified_digests)
        if not metrics["sync/engine_unchanged"]:
            self._verified_digests = self._sent_digests
        if not self._engine.scores_given_tokens:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("sync/")}
        for name in (SHIFT, SHIFT_FARTHEST):
            metrics[name] /= max(1, self._sends)
        self._sends = 0
        start = time.perf_counter()
        arrival = self._arrival.check(self._sent_digests)
        self.held_digest_seconds = time.perf_counter() - start
        draws = {} if self._draws is None else self._draws.take()
        return {**arrival, **draws, **{name: largest(value) for name, value in metrics.items()}}

    def state(self) -> dict[str, Any]:
        """The state that later syncs are compared with, as JSON values."""
        return {
            **self._probes.state(),
            "probe": [asdict(sequence) for sequence in self._probe],
            "comparable": sorted(self._arrival.comparable),
            "num_drawn": 0 if self._draws is None else self._draws.num_drawn,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state` and its probe: an engine that was started again may have sampled another probe."""
        self._probe = [TokenSequence(**sequence) for sequence in state["probe"]]
        self._probes = EngineProbes.of_state(state)
        self._arrival.comparable |= set(state.get("comparable", ()))
        if self._draws is not None:
            self._draws.num_drawn = state.get("num_drawn", 0)

    def _with_digests(self, digests: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the order of sending; the digest of each is recorded."""
        for name, tensor in self._policy.weights(self._dtype):
            start = time.perf_counter()
            digests[name] = weight_digest(tensor)
            self.sent_digest_seconds += time.perf_counter() - start
            yield name, tensor

    def _probe_log_mu(self, num_tokens: int) -> Floats:
        """The engine's log-probs of the probe [T], nats; NaN where it scores no given tokens."""
        if not self._engine.scores_given_tokens:
            return np.full(num_tokens, np.nan)
        return np.concatenate([scores.logprobs for scores in self._engine.replay(self._probe)])

    def _probe_log_pi(self) -> Floats:
        with torch.no_grad(), self._policy.computing():
            logprobs_T, _ = self._policy.logprobs(self._probe)
        return logprobs_T.double().cpu().numpy()
