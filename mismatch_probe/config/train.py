"""What a training run is: the frozen, typed settings that its directory records and a resume must match."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from mismatch_probe.config.model import (
    Attention,
    Count,
    CountOrNone,
    DtypeField,
    EngineSettings,
    ListAsTuple,
    ModelSettings,
    NumPrompts,
    NumSamples,
    Seed,
    Settings,
    Temperature,
)
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import COMPUTED_IN, Dtype

DEFAULT_NUM_PROBLEMS: Final = 256

Tracker = Literal["wandb", "tensorboard", "trackio"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""AdamW moves a weight by about this much at a step."""


class TaskSettings(Settings):
    """Problems and what an answer is worth."""

    source: str = "sums:medium"
    """As `--prompts` of compare."""
    num_problems: NumPrompts | None = None
    """Unset, all of a file or data set, DEFAULT_NUM_PROBLEMS of a task that makes them; a run records the number it
    came to.
    """
    chat_template: Literal["auto", "always", "never"] = "auto"
    reward: str | None = None
    """None is the built-in task's own check, `math` compares with the recorded answer, else `module:function`."""
    truncated: Literal["wrong", "masked"] = "wrong"
    """A response cut at `max_new_tokens` counts as `wrong` (reward 0) or is left out of the loss (`masked`)."""
    reward_workers: Count = 8
    """How many calls of a `module:function` run at a time; with 1 they are made one after another in the main thread,
    and `reward_seconds`, what each may take, is not kept. A call that takes longer gives no reward (NaN).
    """
    reward_seconds: Positive = 60.0
    rewards_repeated: CountOrNone = 4
    """Of how many responses a step the reward is asked for again, to see whether rewards belong to their responses; 0
    for a function that changes with every call.
    """


class RolloutSettings(Settings):
    """What mu samples for one step: `prompts` problems, `samples` responses each."""

    prompts: Count = 32
    samples: NumSamples = 8
    max_new_tokens: Count = 1024
    temperature: Temperature = 1.0
    updates: Count = 1


class ObjectiveSettings(Settings):
    """A name of the catalogue, and what of it is changed."""

    name: str = "grpo"
    overrides: dict[str, Any] = Field(default_factory=dict)


class OptimizerSettings(Settings):
    """AdamW on FP32 master weights; the schedule decays over `steps` after a linear warm-up."""

    learning_rate: LearningRate = 1e-6
    betas: Annotated[tuple[Decay, Decay], ListAsTuple] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrNone = 0


class CriticSettings(Settings):
    """The critic of an objective that has one; AdamW and its schedule are the policy's but for the highest rate."""

    learning_rate: LearningRate = 1e-5
    """Default of verl."""


class LossScaleSettings(Settings):
    """Dynamic loss scaling of FP16: halved on a non-finite gradient, doubled after `growth_interval` clean steps.

    It grows up to 2^24.
    """

    initial: Positive = 2.0**12
    growth_interval: Count = 400


class LoraSettings(Settings):
    """Low-rank adapters (peft), merged in FP32 before the engine gets the weights."""

    rank: Count = 16
    alpha: Count = 32
    target_modules: Annotated[tuple[str, ...], ListAsTuple] | Literal["all-linear"] = "all-linear"


class PolicySettings(Settings):
    """How the training path holds and computes the policy."""

    attention: Attention | None = None
    """Unset, SDPA, or eager where SDPA would differ."""
    device: str = "auto"
    gradient_checkpointing: bool = False
    micro_batch_tokens: Count = 16384
    lora: LoraSettings | None = None


class CheckpointSettings(Settings):
    """A checkpoint every `every` steps; the last `keep` stay, the one with the best reward, and what a rollback needs.

    Two at the least: a checkpoint's weights are judged in the step after it.
    """

    every: Count = 50
    keep: int = Field(default=2, ge=2, lt=2**31)


class ChecksSettings(Settings):
    """How often weights are compared and the engine is probed."""

    max_cost: Annotated[float, Field(gt=0, lt=1)] | None = None
    """The share of a run's time that both may take after each sync; where they would take more they are left out of
    some steps. Unset, they are done in every step.
    """


class TrainSettings(Settings):
    """One run of `train`."""

    model: ModelSettings
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    train_dtype: DtypeField = Dtype.FP16
    infer_dtype: DtypeField = Dtype.FP16
    policy: PolicySettings = PolicySettings()
    engine: EngineSettings = EngineSettings()
    infer: Annotated[tuple[InferSide, ...], ListAsTuple] = ()
    """One side, a server that samples instead of an engine in this process."""
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    loss_scale: LossScaleSettings = LossScaleSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    checks: ChecksSettings = ChecksSettings()
    guards: Annotated[Path, Field(strict=False)] | None = None
    report_to: Annotated[tuple[Tracker, ...], ListAsTuple] = ()
    steps: Count = 100
    seed: Seed = 0

    @property
    def server(self) -> InferSide | None:
        return self.infer[0] if self.infer else None

    @property
    def sampler(self) -> EngineSettings:
        """The engine that samples, wherever it is."""
        return self.engine if self.server is None else self.server.merge_into(EngineSettings())

    @model_validator(mode="before")
    @classmethod
    def _server_has_its_dtype(cls, values: Any) -> Any:
        """`infer_dtype` is the server's unless both are given."""
        sides = values.get("infer") if isinstance(values, dict) else None
        if isinstance(sides, list | tuple) and len(sides) == 1 and isinstance(sides[0], dict):
            return {"infer_dtype": sides[0].get("dtype", Dtype.BF16), **values}
        return values

    @model_validator(mode="after")
    def _samples_from_one_server(self) -> "TrainSettings":
        if self.server is None:
            return self
        if len(self.infer) > 1:
            raise ValueError("train samples from one server; give one --infer")
        if self.server.url is None:
            raise ValueError(
                "--infer names a server here, NAME:url=http://HOST:PORT; the engine in this process has --infer-dtype "
                "and --vllm.KEY"
            )
        if self.server.checkpoint is not None or self.server.adapter is not None:
            raise ValueError("train sends the server its own weights; leave checkpoint and adapter out of --infer")
        if self.server.args.get("transfer") is None:
            raise ValueError(
                "train sends the server its weights, and --infer does not say how; give transfer=gloo, or between GPUs "
                "transfer=nccl"
            )
        if self.engine != EngineSettings():
            raise ValueError(
                "the engine's settings are of one in this process, and --infer names a server; leave one of them out"
            )
        if self.infer_dtype != self.server.dtype:
            raise ValueError(
                f"--infer-dtype {self.infer_dtype} is not what the server computes in, {self.server.dtype}; leave it "
                "out, or give --infer its dtype"
            )
        return self

    @model_validator(mode="after")
    def _trainable(self) -> "TrainSettings":
        for flag, dtype in (("--train-dtype", self.train_dtype), ("--infer-dtype", self.infer_dtype)):
            if not dtype.is_computed_in:
                raise ValueError(f"{dtype} is only a reference; give {flag} one of {', '.join(COMPUTED_IN)}")
        if self.rollout.prompts < self.rollout.updates:
            raise ValueError(
                f"{self.rollout.prompts} prompts cannot be split into {self.rollout.updates} updates; lower "
                "rollout.updates"
            )
        return self
