"""What an inference engine must offer before and after it is started, and how it is checked against itself."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mismatch_probe.children.servers import Preload
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import RoutingUnseen, UsageError
from mismatch_probe.host import Closing
from mismatch_probe.images import images_of
from mismatch_probe.records.legs import SequenceRouting
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    FloatArray,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
)

if TYPE_CHECKING:
    import torch


Products = Callable[[], AbstractContextManager[Any]]
"""What defines matrix products while it is entered."""


@dataclass(frozen=True)
class CachedReplay:
    """A response that was scored with a part of its prompt read from the prefix cache."""

    scores: ScoredSequence
    num_cached_tokens: int
    """How many tokens of the prompt came from the cache; with 0 the scores are those of a plain replay."""


@dataclass(frozen=True)
class HeldWeight:
    """A weight as one of an engine's workers holds it."""

    digest: int
    """As `engines.weight_digests.weight_digest` computes it."""
    num_elements: int
    made_of: Mapping[str, int]
    """The checkpoint's tensors that are in it, each with how many times all workers that share the weight hold it;
    empty where that is not known.
    """


@dataclass(frozen=True)
class EngineStart:
    """What an engine is started with."""

    checkpoint: str
    """A folder or a hub id."""
    dtype: Dtype
    """What it computes in."""
    engine: EngineSettings
    """The settings of the engine itself, its own arguments (`args`) among them."""
    sampling: SamplingSettings
    max_model_len: int
    """Tokens of the longest prompt and response and one position more, which the obligatory output token of a replay
    takes. It must not exceed the checkpoint's context.
    """
    num_sequences: int | None = None
    """How many sequences a call gives at most, for which a CPU engine makes room; None where that is not known."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    seed: int = 0
    products: Products = nullcontext
    """Entered around every computation of an engine that runs eagerly in this process: a trainer on a CPU can give both
    sides the same matrix products.
    """
    num_images: int = 0
    """The most images that a prompt holds."""


class EngineProvider(Protocol):
    """What is known of an engine that is not started; a package brings one in the entry points
    `mismatch_probe.engines`, under the name that `engine.name` gives.

    Importing the module that holds it must be quick: the engine's library is imported inside of `start` and `rehearse`,
    which run in processes of their own. An engine without arguments or limits needs `start` alone:

        class Mine(EngineProvider):
            packages = ("my_engine",)

            def start(self, how: EngineStart) -> Engine:
                from my_package.engine import MyEngine

                return MyEngine(how)

        MINE = Mine()
    """

    packages: tuple[str, ...] = ()
    """Modules that must be there besides torch and transformers."""
    takes_images: bool = False
    """Whether its engine has a `look_at` of its own, and takes prompts and sequences that hold images."""
    preload: Preload = "training"
    """The imports that its processes are forked from: `training` has torch and transformers."""

    @abstractmethod
    def start(self, how: EngineStart) -> "Engine":
        """Load the checkpoint.

        Raises:
            MissingExtra: the engine's library is not installed.
            UsageError: an argument, the checkpoint or the sampling settings cannot be used.
            OutOfMemory: the model or its KV cache does not fit.
            EngineError: the engine could not start, or runs another dtype than the one asked for.
        """

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's own arguments under its own names and in its own types: a flag gives text where a file gives a
        number.

        Raises:
            UsageError: the engine has no such argument, or none that takes such a value.
        """
        if arguments:
            raise UsageError(f"engine.args.{next(iter(arguments))} cannot be given: this engine has no arguments")
        return {}

    def default_arguments(self) -> Mapping[str, Any]:
        """What those arguments are that are not given."""
        return {}

    def check_limits(self, dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
        """Refuse what needs no checkpoint to be seen.

        Raises:
            UsageError: the engine has no such dtype, cannot sample so, or cannot do what its settings ask for.
        """
        return

    def rehearse(self, how: EngineStart) -> None:
        """Go through the start as far as no weight is loaded, in a process of its own.

        Raises:
            MismatchProbeError: what `start` would raise up to there.
        """
        return

    def reach(self, engine: EngineSettings) -> int | None:
        """Ask an engine that runs elsewhere whether it answers; the longest sequence that it holds, in tokens, where it
        says so.

        Raises:
            UsageError: what answers is no server that can be asked, wants a key, or serves another model.
            EngineError: nothing answers.
        """
        return None


class Engine(Closing):
    """A started engine that holds one checkpoint in one dtype; use it as a context manager.

    A call is one batch: its result depends on the batch and the settings alone, never on earlier calls.
    """

    on_finished: Callable[[int, int], None] | None = None
    """Called during a call with how many of its requests are done, and how many there are."""

    def look_at(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Prepare the images of the prompts as for sampling, and add to the effective settings what became of them
        (`images`). It is called before anything is sampled, where any prompt holds images.

        Raises:
            UsageError: the engine takes no images, or makes another number of placeholders of them.
            EngineError: the engine failed.
        """
        if images_of(prompts):
            raise UsageError("prompts hold images, and this engine takes none; give prompts of text")

    @abstractmethod
    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        """One response a request, in request order, with the log-probs (nats) mu had of each token while decoding.

        A response ends at `max_new_tokens`, at an end-of-sequence token, or one token short of `max_model_len`.

        Raises:
            UsageError: a prompt leaves no room for a response, or `sampling` differs from what the engine was started
                with in what shapes the distribution (temperature, top_p, top_k).
            EngineError: the engine failed or did not deliver what was asked.
        """

    @abstractmethod
    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        """Log-probs (nats) of given responses' tokens computed by prefill, in order, at the sampling temperature.

        Raises:
            UsageError: a sequence is longer than `max_model_len - 1`.
            EngineError: the engine failed or scored other token ids than those given.
        """

    @property
    def scores_given_tokens(self) -> bool:
        """Whether `replay` may be asked for."""
        return True

    def replay_cached(self, sequences: Sequence[TokenSequence]) -> list[CachedReplay]:
        """As `replay`, each alone and computed behind what the prefix cache holds of its prompt, in order.

        Raises:
            UsageError: the engine keeps no prefix cache, or a sequence is too long.
            EngineError: the engine failed or scored other token ids than those given.
        """
        raise UsageError("this engine keeps no prefix cache, so nothing can be computed behind it")

    def routing(self, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
        """Which experts each token takes in a `replay`, and how it weighs them, in order.

        Raises:
            RoutingUnseen: the model has no experts, or their choice cannot be read in this engine as it was started.
            UsageError: a sequence is longer than `max_model_len - 1`.
            EngineError: the engine failed.
        """
        raise RoutingUnseen("this engine does not say which experts it chooses")

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens that the engine has log-probs for."""

    @abstractmethod
    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        """Log-probs (nats, FP32) of every token of the vocabulary after each context [P, V], as sampling has them.

        Minus infinity marks a token that cannot be sampled, NaN one whose log-prob was not delivered.

        Raises:
            UsageError: a context leaves no room for a token.
            EngineError: the engine failed.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Replace every weight by the tensors given under their checkpoint names, and forget what the old ones cached.

        Raises:
            EngineError: the engine refused a tensor.
        """

    def held_weights(self, names: Sequence[str]) -> list[dict[str, HeldWeight]]:
        """What each worker of this process's engine holds, by its own names; `names` are those of the checkpoint.

        None where an engine cannot say.

        Raises:
            EngineError: the engine failed.
        """
        return []

    def require_same_policy(self, record: Mapping[str, Any]) -> None:
        """Hold the engine to the effective settings that an earlier process recorded of it, beyond what equal settings
        say; one that loads a checkpoint itself is held to its files.

        Raises:
            EngineError: it holds other weights now.
        """

    @abstractmethod
    def effective_settings(self) -> dict[str, Any]:
        """What the running engine reports of itself, as plain JSON values: at least its name (`engine`), its
        `dtype`, and whether it has a prefix cache (`prefix_caching`), with its `block_size` where it has.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the engine's memory and processes; harmless when repeated."""


def scored_alone(engine: Engine, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
    """Prefill scores of each sequence in a batch of its own, with which a leg computed in full batches is compared."""
    return [engine.replay([sequence])[0] for sequence in sequences]


def decoded_alone(
    engine: Engine, requests: Sequence[SampleRequest], sampling: SamplingSettings, sequences: Sequence[TokenSequence]
) -> list[ScoredSequence]:
    """Decode scores of responses whose requests are sampled again in batches of their own, with their seeds.

    NaN from the first token that comes out otherwise, or is not sampled within `sampling.max_new_tokens`.
    """
    common = []
    for request, sequence in zip(requests, sequences, strict=True):
        repeat = engine.sample([request], sampling)[0]
        common.append(_common_scores(repeat, sequence))
    return common


def _common_scores(repeat: SampledSequence, sequence: TokenSequence) -> ScoredSequence:
    shorter = min(len(repeat.sequence.token_ids), len(sequence.token_ids))
    differs = np.not_equal(repeat.sequence.token_ids[:shorter], sequence.token_ids[:shorter])
    length = int(differs.argmax()) if differs.any() else shorter
    logprobs = np.full(len(sequence.token_ids), np.nan, dtype=np.float32)
    logprobs[:length] = repeat.scores.logprobs[:length]
    return ScoredSequence(sequence.id, logprobs)
