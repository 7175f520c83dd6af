"""What a headroom examination is: the frozen, typed settings that its document records."""

from typing import Any, Final

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import (
    Attention,
    Count,
    ModelSettings,
    NumSamples,
    PromptSettings,
    SamplingSettings,
    Settings,
)
from mismatch_probe.config.train import ObjectiveSettings

DEFAULT_NUM_PROMPTS: Final = 8


class HeadroomPrompts(PromptSettings):
    """Prompts as `compare` takes them; num_prompts: unset, DEFAULT_NUM_PROMPTS or all of a smaller source."""

    source: str = "sums:medium"


class HeadroomSampling(SamplingSettings):
    """How the FP32 model samples the responses; a group of several a prompt, as a policy gradient needs."""

    samples_per_prompt: NumSamples = 4
    max_new_tokens: Count = 128


class HeadroomSettings(Settings):
    """One examination.

    reward: as `train`'s; unset, the task's own check. attention: of the 16-bit runs; unset, SDPA, and eager attention
    where SDPA would leave out a part of the architecture. The FP32 run is eager, where every product is seen.
    batch_tokens: padded size of a forward pass.
    """

    model: ModelSettings
    prompts: HeadroomPrompts = HeadroomPrompts()
    sampling: HeadroomSampling = HeadroomSampling()
    reward: str | None = None
    objective: ObjectiveSettings = ObjectiveSettings()
    attention: Attention | None = None
    device: str = "auto"
    batch_tokens: Count = 1024
    weights_only: bool = False


def headroom_values(run: CompareSettings) -> dict[str, Any]:
    """What a comparison ran with, as far as an examination asks for it."""
    return {
        "model": run.model.model_dump(),
        "prompts": run.prompts.model_dump(include={"source", "chat_template"}),
        "sampling": run.sampling.model_dump(include={"max_new_tokens", "temperature", "seed"}),
        "attention": run.training.attention,
        "device": run.training.device,
    }
