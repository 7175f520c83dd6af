"""Responses sampled from pi itself, by the `generate` of transformers."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel

from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.host import Closing
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.precision import load_training_model


@dataclass(frozen=True)
class GeneratedResponse:
    """A response with its end token; one with the finish reason `length` has the most tokens and no end token."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Sampler(Closing):
    """Samples from pi; use it in a `with` block.

    It decodes with a key-value cache, one token a pass, and scoring takes complete responses: the formats are the same,
    the shapes of the products are not.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        sampling: SamplingSettings,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self._model, self._arithmetic = load_training_model(
            Path(checkpoint), dtype, settings, choose_device(settings.device), trust_remote_code=trust_remote_code
        )
        self._sampling = sampling

    def sample(self, prompts: Sequence[EncodedPrompt], end_token_id: int | None, seed: int) -> list[GeneratedResponse]:
        """One response a prompt, in order; the same batch and seed give the same responses."""
        ends = end_token_ids(self._model) | (set() if end_token_id is None else {end_token_id})
        with (
            memory_errors_named(f"sampling {len(prompts)} responses of pi", "lower engine.batch_sequences"),
            self._arithmetic.active(),
        ):
            return generate(self._model, [prompt.token_ids for prompt in prompts], self._sampling, ends, seed)

    def close(self) -> None:
        """Give the model's memory back."""
        on_gpu = self._model.device.type == "cuda"
        del self._model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def end_token_ids(model: PreTrainedModel) -> set[int]:
    """Ids with which a response of the model ends, by its generation config."""
    ids: Any = None if model.generation_config is None else model.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    sampling: SamplingSettings,
    ends: set[int],
    seed: int,
    *,
    samples: int = 1,
) -> list[GeneratedResponse]:
    """Sample responses to one prompt after the other in the active arithmetic.

    The model's own sampling defaults are ignored. The same batch and seed give the same responses.
    """
    longest, padding = max(map(len, prompts)), min(ends, default=0)
    ids_BS = torch.full((len(prompts), longest), padding)
    mask_BS = torch.zeros_like(ids_BS)
    for row, token_ids in enumerate(prompts):
        ids_BS[row, longest - len(token_ids) :] = torch.tensor(token_ids)
        mask_BS[row, longest - len(token_ids) :] = 1
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.max_new_tokens if sampling.ignore_eos else None,
        num_return_sequences=samples,
        eos_token_id=sorted(ends) or None,
        pad_token_id=padding,
    )
    device: Any = model.device
    defaults, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            decode: Any = model.generate
            output_BS = decode(ids_BS.to(device), attention_mask=mask_BS.to(device), generation_config=config)
    finally:
        model.generation_config = defaults
    return [_cut_at_end(row, ends) for row in output_BS[:, longest:].tolist()]


def _cut_at_end(token_ids: list[int], ends: set[int]) -> GeneratedResponse:
    """The tokens up to and including the first end token; the rest is padding."""
    stop = next((place for place, token_id in enumerate(token_ids) if token_id in ends), None)
    return GeneratedResponse(token_ids, "length") if stop is None else GeneratedResponse(token_ids[: stop + 1], "stop")
