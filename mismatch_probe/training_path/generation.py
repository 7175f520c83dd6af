"""Responses sampled from pi itself: transformers' own decoding, in the arithmetic that pi is scored in."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from mismatch_probe.closing import Closing
from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.precision import load_training_model


@dataclass(frozen=True)
class Generated:
    """A response, its end token included; cut at the most tokens it could have where it ended by `length`."""

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Sampler(Closing):
    """pi, loaded to sample; use it in a `with` block.

    It decodes with a key-value cache, one token a pass, where scoring takes whole responses: the formats are the same,
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
        """
        Raises:
            UsageError: the checkpoint, the device or the combination cannot be used.
            EngineError: the model does not support what is asked.
            OutOfMemory: the model does not fit.
        """
        self._model, self._arithmetic = load_training_model(
            Path(checkpoint), dtype, settings, choose_device(settings.device), trust_remote_code=trust_remote_code
        )
        defaults: Any = self._model.generation_config
        ends = defaults.eos_token_id
        self._ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self._model.generation_config = GenerationConfig()
        self._sampling = sampling

    def sample(self, prompts: Sequence[EncodedPrompt], end_token_id: int | None, seed: int) -> list[Generated]:
        """One response a prompt, in order; the same batch and seed give the same responses.

        Raises:
            OutOfMemory: the batch does not fit.
        """
        ends = sorted({*self._ends, *([] if end_token_id is None else [end_token_id])})
        longest = max(len(prompt.token_ids) for prompt in prompts)
        padding = ends[0] if ends else 0
        ids_BS = torch.full((len(prompts), longest), padding)
        mask_BS = torch.zeros_like(ids_BS)
        for row, prompt in enumerate(prompts):
            ids_BS[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask_BS[row, longest - len(prompt.token_ids) :] = 1
        config = GenerationConfig(
            do_sample=True,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            max_new_tokens=self._sampling.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=padding,
        )
        device: Any = self._model.device
        with (
            memory_errors_named(f"sampling {len(prompts)} responses of pi", "lower engine.batch_sequences"),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            self._arithmetic.active(),
        ):
            torch.manual_seed(seed)
            generate: Any = self._model.generate
            output_BS = generate(ids_BS.to(device), attention_mask=mask_BS.to(device), generation_config=config)
        return [_ended(row, set(ends)) for row in output_BS[:, longest:].tolist()]

    def close(self) -> None:
        """Give the model's memory back."""
        on_gpu = self._model.device.type == "cuda"
        del self._model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def _ended(token_ids: list[int], ends: set[int]) -> Generated:
    """The tokens up to and with the first end token; what follows it pads."""
    stop = next((place for place, token_id in enumerate(token_ids) if token_id in ends), None)
    return Generated(token_ids, "length") if stop is None else Generated(token_ids[: stop + 1], "stop")
