"""The reference's log-probs layer by layer: every response goes through a layer before the next layer is read.

The hidden states of every batch between two layers are in memory or on disk, and saved so that a killed run continues.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, Self

import numpy as np
import torch
from transformers import PreTrainedModel

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.stored_tensors import stored_quantization
from mismatch_probe.records.files import replacing
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic, torch_dtype
from mismatch_probe.training_path.attention import choose_reference_attention, use_reference_kernels
from mismatch_probe.training_path.batching import PAD_ID, ChunkedHead, in_order, pad_batch
from mismatch_probe.training_path.by_layer_model import LayeredModel, behind_layers, others_handing_on, through_layer
from mismatch_probe.training_path.loading import choose_device
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.scorer import Scorer

_MOST_OF_THE_TIME: Final = 0.1
"""The share of the time that saving may take where the states are in memory."""

States = list[torch.Tensor]


class HiddenStates:
    """The number of layers that each batch has passed, and the hidden states [B, S, D] of its passes after them.

    A batch is one file, which names the layer and the rows of each pass. Where the states are kept in memory the files
    are written behind a layer, as often as that takes no more than a tenth of the time; otherwise at every layer.
    """

    def __init__(self, folder: Path, *, in_memory: bool) -> None:
        self.in_memory = in_memory
        self._folder = folder
        self._layers: dict[int, int] = {}
        self._in_memory: dict[int, States] = {}
        self._passes: dict[int, list[list[int]]] = {}
        self._saved_at = time.monotonic()
        self._saving_seconds = 0.0

    def open(self, batch: int, passes: Sequence[Sequence[int]]) -> int:
        """The number of layers that a batch has passed; 0 where it was last computed in other passes."""
        self._passes[batch] = [list(rows) for rows in passes]
        content = self._read_states(batch)
        self._layers[batch] = 0 if content is None else content["layers"]
        if content is not None and self.in_memory:
            self._in_memory[batch] = content["hidden"]
        return self._layers[batch]

    def layers(self, batch: int) -> int:
        return self._layers[batch]

    def get(self, batch: int) -> Sequence[torch.Tensor | None]:
        """The hidden states of each pass; None before the first layer."""
        if not self._layers[batch]:
            return [None] * len(self._passes[batch])
        if self.in_memory:
            return self._in_memory[batch]
        content = self._read_states(batch)
        assert content is not None, "nobody else removes it"
        states: States = content["hidden"]
        return states

    def put(self, batch: int, layers: int, states: States) -> None:
        self._layers[batch] = layers
        if self.in_memory:
            self._in_memory[batch] = states
        else:
            self._write_states(batch, states)

    def end_layer(self) -> None:
        """Save the states that are in memory, unless they were saved a moment ago."""
        before = time.monotonic()
        if before - self._saved_at < self._saving_seconds / _MOST_OF_THE_TIME:
            return
        for batch, states in self._in_memory.items():
            self._write_states(batch, states)
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - before

    def forget(self, batch: int) -> None:
        """Remove the states of a batch whose scores are recorded."""
        self._in_memory.pop(batch, None)
        self._states_path(batch).unlink(missing_ok=True)

    def _write_states(self, batch: int, states: States) -> None:
        state = {"layers": self._layers[batch], "passes": self._passes[batch], "hidden": states}
        with replacing(self._states_path(batch)) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch's own words about a write that the system refused
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def _read_states(self, batch: int) -> dict[str, Any] | None:
        """Read a batch's file; None where it is absent, damaged or of other passes, and the batch is computed again."""
        try:
            content: dict[str, Any] = torch.load(self._states_path(batch), weights_only=True)
        except (FileNotFoundError, RuntimeError, EOFError, UnpicklingError):
            return None
        return content if content["passes"] == self._passes[batch] else None

    def _states_path(self, batch: int) -> Path:
        return self._folder / f"{batch:06d}-hidden.pt"


_ADVICE = "use a device with more memory"


@dataclass(frozen=True)
class ScoredBatch:
    """A batch's scores and its seconds: its share of the layers' time and its own time after the layers."""

    number: int
    scores: list[ScoredSequence]
    seconds: float


class LayerByLayerScorer(Scorer):
    """A reference that holds one layer at a time, or two where it reads ahead; it gives the bits of one loaded whole.

    A single batch takes a reading of the whole checkpoint, so score many at once, with `score_batches`.
    """

    _layered_model: LayeredModel
    _why: str

    @classmethod
    def load_layered(
        cls,
        folder: Path,
        dtype: Dtype,
        settings: TrainingPathSettings,
        *,
        why: str,
        rounded_to: Dtype | None = None,
        temperature: float = 1.0,
        trust_remote_code: bool = False,
    ) -> Self:
        """Load a reference; `why` is recorded as the reason for layer by layer. See `Scorer.load` for the rest."""
        require_layerable(folder, settings)
        device = choose_device(settings.device)
        target = torch_dtype(dtype)
        with memory_errors_named(f"loading {folder} layer by layer", _ADVICE):
            layered_model = LayeredModel(
                folder,
                target,
                target if rounded_to is None else torch_dtype(rounded_to),
                device,
                trust_remote_code=trust_remote_code,
            )
            use_reference_kernels(layered_model.model)
            arithmetic = Arithmetic(dtype, device.type, autocast_dtype=None, is_reference=True)
            choice = choose_reference_attention(layered_model.model, arithmetic)
        scorer = cls(
            folder,
            layered_model.model,
            arithmetic,
            TrainingPathSettings(device=settings.device, batch_tokens=settings.batch_tokens),
            temperature=temperature,
            weights_dtype=rounded_to or dtype,
            attention_choice=choice,
        )
        scorer._layered_model, scorer._why = layered_model, why
        return scorer

    def close(self) -> None:
        """Free the memory, also that of the weights outside the layers."""
        del self._layered_model
        super().close()

    @property
    def hidden_size(self) -> int:
        size: int = self._model.config.get_text_config().hidden_size
        return size

    def agreement_with_itself(self, sequences: Sequence[TokenSequence]) -> dict[str, Any] | None:
        """None: each token behind a cache would take a reading of the whole checkpoint."""
        return None

    def effective_settings(self) -> dict[str, Any]:
        """The settings of `Scorer` and the reason for layer by layer; weights outside the layers are on `device`."""
        settings_by_layer = {
            "why": self._why,
            "layers": self._layered_model.parts.num_layers,
            "reads_ahead": self._layered_model.reads_ahead,
        }
        return {**super().effective_settings(), "device": str(self._model.device), "by_layer": settings_by_layer}

    def score_batches(
        self, batches: Mapping[int, list[TokenSequence]], states: HiddenStates, layer_done: Callable[[int, int], None]
    ) -> Iterator[ScoredBatch]:
        """Scores of each batch of `plan_batches`, as `score_batch` gives them, after all batches passed all layers.

        It continues from `states`. layer_done: receives the number of finished layers and that of all.
        """
        passes = {number: self._plan_batch(batch) for number, batch in batches.items()}
        began = time.monotonic()
        num_layers = self._layered_model.parts.num_layers
        first = min((states.open(number, rows) for number, rows in passes.items()), default=num_layers)
        with memory_errors_named("computing a layer", _ADVICE):
            for layer in self._layered_model.each_filled(first):
                for number, batch in batches.items():
                    if states.layers(number) == layer:
                        rows = [[batch[row] for row in rows] for rows in passes[number]]
                        states.put(number, layer + 1, self._states_behind_layer(layer, rows, states.get(number)))
                states.end_layer()
                layer_done(layer + 1, num_layers)
        each = (time.monotonic() - began) / max(len(batches), 1)
        for number, batch in batches.items():
            began = time.monotonic()
            scores = self._score_last_states(batch, passes[number], states.get(number))
            yield ScoredBatch(number, scores, each + time.monotonic() - began)

    def _states_behind_layer(
        self, layer: int, passes: list[list[TokenSequence]], states: Sequence[torch.Tensor | None]
    ) -> States:
        """The hidden states of a batch's passes after a layer, on the host."""

        def compute(model: PreTrainedModel, item: tuple[list[TokenSequence], torch.Tensor | None]) -> torch.Tensor:
            sequences, before_BSD = item
            batch_of_pass = pad_batch(sequences, vocab_size=self._vocab_size, pad_id=PAD_ID)
            at = self._model.device
            behind_BSD = through_layer(
                model, layer, None if before_BSD is None else before_BSD.to(at), batch_of_pass.input_ids_BS.to(at)
            )
            return behind_BSD.cpu()

        with others_handing_on(self._model, layer) as others:
            return self._run_passes(list(zip(passes, states, strict=True)), compute, others)

    def _score_last_states(
        self, batch: list[TokenSequence], passes: list[list[int]], states: Sequence[torch.Tensor | None]
    ) -> list[ScoredSequence]:
        """Scores from the hidden states behind the last layer.

        As in `score_batch`, a padded row without finite scores is computed again alone, from the checkpoint's files.
        """

        def compute(model: PreTrainedModel, item: tuple[list[int], torch.Tensor | None]) -> list[ScoredSequence]:
            rows, hidden_BSD = item
            assert hidden_BSD is not None, "every layer is done"
            with behind_layers(model, hidden_BSD.to(self._model.device)):
                return self._score_padded(ChunkedHead(model), [batch[row] for row in rows], PAD_ID)

        with others_handing_on(self._model, self._layered_model.parts.num_layers - 1) as others:
            each = self._run_passes(list(zip(passes, states, strict=True)), compute, others)
        scores = in_order(passes, each)
        for rows in passes:
            longest = max(batch[row].num_tokens for row in rows)
            for row in rows:
                if batch[row].num_tokens < longest and not np.isfinite(scores[row].logprobs).all():
                    (scores[row],) = self.score_batch([batch[row]])
        return scores


def require_layerable(folder: Path, settings: TrainingPathSettings) -> None:
    """
    Raises:
        UsageError: the weights are quantised, or an adapter is computed beside them.
    """
    instead = "set reference.by_layer = false, or give --reference none"
    if stored_quantization(folder) is not None:
        raise UsageError(
            f"the weights of {folder} are quantised, and the reference reads only plain weights layer by layer; give "
            f"the training side the checkpoint that was quantised (--train NAME:checkpoint=...), or {instead}"
        )
    if settings.adapter is not None:
        raise UsageError(
            f"the reference with an adapter cannot be computed layer by layer; merge {settings.adapter} into the "
            f"checkpoint, or {instead}"
        )
