"""The faults: what goes wrong, how strongly, which guard must see it, and which cause the diagnosis must name."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.training_faults.injection import Inject, Now, optimizer_of, replaced
from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.diagnosis import EndCause
from mismatch_probe.records.sequences import EncodedPrompt, SampledSequence, SampleRequest
from mismatch_probe.tasks.rewards import Reward
from mismatch_probe.train.parts import TrainingParts

Weights = Iterable[tuple[str, torch.Tensor]]

TRAINED: Final[tuple[Dtype, ...]] = (Dtype.FP16, Dtype.BF16)
_LAYER: Final = "layers.1."
_BAD_REWARD_EVERY: Final = 8
_FAR_ABOVE_FP16: Final = 2.0**60
_ONE_NORM: Final = 1e6


@dataclass(frozen=True)
class Fault:
    """A fault at one strength.

    `usual` marks what a default guard must catch within two steps; other strengths show where that ends. `guards`: any
    of them is right. `lasts`: steps it is there for, to the end where None.
    """

    name: str
    strength: str
    inject: Inject
    guards: tuple[str, ...]
    causes: tuple[EndCause, ...]
    usual: bool = True
    lasts: int | None = None
    dtypes: tuple[Dtype, ...] = TRAINED

    @property
    def slug(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in f"{self.name} {self.strength}").split())


def sync_skipped(parts: TrainingParts, now: Now) -> None:
    """The engine takes what it is sent and keeps what it has."""

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            if now.faulty:
                deque(weights, maxlen=0)
            else:
                update_weights(weights)

        return update

    replaced(parts.engine, "update_weights", make)


def first_sync_skipped(parts: TrainingParts, now: Now) -> None:
    """As `sync_skipped`, once: when the same step sends again, the engine takes it."""
    skipped = False

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        def update(weights: Weights) -> None:
            nonlocal skipped
            if now.faulty and not skipped:
                skipped = True
                deque(weights, maxlen=0)
            else:
                update_weights(weights)

        return update

    replaced(parts.engine, "update_weights", make)


def sampling_temperature(parts: TrainingParts, now: Now, *, temperature: float) -> None:
    """The engine samples at another temperature than it is told, and its log-probs are of that temperature."""
    engine: Any = parts.engine

    def make(generate: Callable[..., Any]) -> Callable[..., Any]:
        def at_another(inputs: Any, params: Sequence[Any], **rest: Any) -> Any:
            for param in params:
                if now.faulty and param.temperature > 0:
                    param.temperature = temperature
            return generate(inputs, params, **rest)

        return at_another

    replaced(engine.llm, "generate", make)


def hidden_sampling_temperature(parts: TrainingParts, now: Now, *, temperature: float) -> None:
    """As `sampling_temperature`, and the log-probs are those of the temperature it was told."""
    sampling_temperature(parts, now, temperature=temperature)

    def make(sample: Callable[..., list[SampledSequence]]) -> Callable[..., list[SampledSequence]]:
        def unseen(requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
            sampled = sample(requests, sampling)
            if not now.faulty:
                return sampled
            told = parts.engine.replay([response.sequence for response in sampled])
            return [replace(one, scores=scores) for one, scores in zip(sampled, told, strict=True)]

        return unseen

    replaced(parts.engine, "sample", make)


def training_temperature(parts: TrainingParts, now: Now, *, temperature: float) -> None:
    """The training path divides its logits by another temperature than the engine."""
    module: Any = parts.policy.module

    def make(send: Callable[[], None]) -> Callable[[], None]:
        def first_divide(*_: Any) -> None:
            if now.faulty:
                replaced(module, "_temperature", lambda _: temperature)
            send()

        return first_divide

    replaced(parts.sync, "send", make)


def layer_perturbed(parts: TrainingParts, now: Now, *, noise: float) -> None:
    """One layer's matrices reach the engine with noise of `noise` times their standard deviation."""

    def spoiled(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for name, tensor in weights:
            if now.faulty and _LAYER in name and tensor.dim() == 2:
                drawn = torch.randn(tensor.shape, generator=generator) * (noise * float(tensor.float().std()))
                yield name, (tensor.float() + drawn).to(tensor.dtype)
            else:
                yield name, tensor

    def make(update_weights: Callable[[Weights], None]) -> Callable[[Weights], None]:
        return lambda weights: update_weights(spoiled(weights))

    replaced(parts.engine, "update_weights", make)


def reward_nan(parts: TrainingParts, now: Now) -> None:
    """The reward function returns NaN for one response in eight."""
    calls = 0

    def make(reward: Reward) -> Reward:
        def score(prompt: EncodedPrompt, response: str) -> Any:
            nonlocal calls
            calls += 1
            return float("nan") if now.faulty and calls % _BAD_REWARD_EVERY == 0 else reward.score(prompt, response)

        return replace(reward, score=score)

    replaced(parts.rollouts, "_reward", make)


def scheduled_rate(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """The schedule gives another rate, which the log shows."""

    def make(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: rate(step) * (factor if now.faulty else 1)

    replaced(optimizer_of(parts), "learning_rate", make)


def applied_rate(parts: TrainingParts, now: Now, *, factor: float) -> None:
    """The optimizer steps at another rate than the log shows."""

    def make(step: Callable[[float], None]) -> Callable[[float], None]:
        return lambda rate: step(rate * (factor if now.faulty else 1))

    replaced(optimizer_of(parts), "step", make)


def loss_scale(parts: TrainingParts, now: Now) -> None:
    """The loss scale is set far above what FP16 holds, once; halving has to bring it back."""
    optimizer = optimizer_of(parts)

    def make(send: Callable[[], None]) -> Callable[[], None]:
        def first_raise() -> None:
            if now.step == now.onset and optimizer.loss_scale is not None:
                optimizer.loss_scale.value = _FAR_ABOVE_FP16
            send()

        return first_raise

    replaced(parts.sync, "send", make)


def activations(parts: TrainingParts, now: Now) -> None:
    """The training path's last norm multiplies by a million, past what FP16 holds, once the engine has its weights."""
    module: Any = parts.policy.module
    norm = module.model.model.norm.weight

    def make(sample: Callable[[int], Any]) -> Callable[[int], Any]:
        def then_grow(step: int) -> Any:
            if now.step == now.onset:
                with torch.no_grad():
                    norm.to_local().mul_(_ONE_NORM)
            return sample(step)

        return then_grow

    replaced(parts.rollouts, "sample", make)


def at_strengths(
    name: str,
    inject: Callable[..., None],
    strengths: Mapping[str, dict[str, float]],
    guards: tuple[str, ...],
    causes: tuple[EndCause, ...],
    usual: Sequence[str] = (),
) -> Iterator[Fault]:
    """A fault at each of its strengths; all are usual unless `usual` names some."""
    for strength, arguments in strengths.items():
        yield Fault(name, strength, partial(inject, **arguments), guards, causes, strength in (usual or strengths))


FAULTS: Final[tuple[Fault, ...]] = (
    Fault("sync skipped", "every sync", sync_skipped, ("stale-engine",), (EndCause.STALE_SYNC,)),
    Fault("sync skipped", "once", first_sync_skipped, ("stale-engine",), (EndCause.STALE_SYNC,)),
    *at_strengths(
        "engine samples at another temperature",
        sampling_temperature,
        {f"{value:g} for 1": {"temperature": value} for value in (0.8, 1.05, 1.2)},
        ("temperature",),
        (EndCause.TEMPERATURE,),
        usual=("0.8 for 1", "1.2 for 1"),
    ),
    *at_strengths(
        "engine samples at another temperature, its log-probs do not show it",
        hidden_sampling_temperature,
        {f"{value:g} for 1": {"temperature": value} for value in (0.5, 1.5, 2.0)},
        ("sampling",),
        (EndCause.TEMPERATURE,),
        usual=("1.5 for 1", "2 for 1"),
    ),
    *at_strengths(
        "training path at another temperature",
        training_temperature,
        {f"{value:g} for 1": {"temperature": value} for value in (0.8, 1.2)},
        ("temperature",),
        (EndCause.TEMPERATURE,),
    ),
    *at_strengths(
        "one layer perturbed on its way to the engine",
        layer_perturbed,
        {f"noise of {value:.0%}": {"noise": value} for value in (0.01, 0.05, 0.2)},
        ("engine-weights", "engine-layer"),
        (EndCause.ENGINE_WEIGHTS,),
        usual=("noise of 20%",),
    ),
    Fault(
        "reward NaN",
        "one response in 8",
        reward_nan,
        ("reward-nonfinite",),
        (EndCause.REWARD_NAN,),
    ),
    Fault("reward NaN", "one step only", reward_nan, ("reward-nonfinite",), (EndCause.REWARD_NAN,), lasts=1),
    *at_strengths(
        "learning rate, as scheduled",
        scheduled_rate,
        {f"x {value:g}": {"factor": value} for value in (100.0,)},
        ("learning-rate-jump",),
        (EndCause.LEARNING_RATE,),
    ),
    *at_strengths(
        "learning rate, applied unseen",
        applied_rate,
        {f"x {value:g}": {"factor": value} for value in (100.0,)},
        ("update-size", "update-jump"),
        (EndCause.LEARNING_RATE,),
    ),
    Fault(
        "loss-scale overflow",
        "scale of 2^60",
        loss_scale,
        ("overflow",),
        (EndCause.FP16_DEAD,),
        lasts=1,
        dtypes=(Dtype.FP16,),
    ),
    Fault(
        "activations beyond FP16",
        "last norm x 1e6",
        activations,
        ("loss-nonfinite", "mismatch-nonfinite"),
        (EndCause.FP16_DEAD, EndCause.NONFINITE_GRADIENT),
        dtypes=(Dtype.FP16,),
    ),
)
