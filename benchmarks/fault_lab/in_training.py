"""Faults of the training path: the real scorer on an edited checkpoint, other settings, or edited sequences."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_lab.models import with_config, with_weights
from benchmarks.fault_lab.recording import OpenScorer, TrainingSide
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer, passes
from mismatch_probe.training_path.batching import PaddedBatch, pad_batch

Edit = Callable[[list[TokenSequence]], list[TokenSequence]]


@contextmanager
def opened(
    folder: Path,
    dtype: Dtype,
    *,
    reference: bool,
    temperature: float = 1.0,
    edit: Edit | None = None,
    **settings: Any,
) -> Iterator[TrainingSide]:
    """The product's scorer; `edit` changes what it is given, unseen by the record."""
    with Scorer.load(
        folder, dtype, TrainingPathSettings(**settings), reference=reference, temperature=temperature
    ) as scorer:
        yield TrainingSide(scorer) if edit is None else TrainingSide(scorer, edit)


def at_temperature(folder: Path, temperature: float) -> OpenScorer:
    return lambda dtype, reference: opened(folder, dtype, reference=reference, temperature=temperature)


def with_settings(folder: Path, **settings: Any) -> OpenScorer:
    """pi under other settings; the reference knows none of them."""
    return lambda dtype, reference: opened(folder, dtype, reference=reference, **({} if reference else settings))


def in_dtype(folder: Path, really: Dtype) -> OpenScorer:
    """pi computes in `really` where 16 bits are asked for, and says what was asked."""

    @contextmanager
    def open_one(dtype: Dtype, reference: bool) -> Iterator[TrainingSide]:
        applied = dtype if reference or dtype == "fp32" else really
        with opened(folder, applied, reference=reference) as side:
            side.effective_settings["dtype"] = dtype
            yield side

    return open_one


def with_prefix(folder: Path, prefix: list[int]) -> OpenScorer:
    """Every prompt with `prefix` before it."""
    return edited(
        folder,
        lambda batch: [replace(sequence, prompt_token_ids=prefix + sequence.prompt_token_ids) for sequence in batch],
    )


def doubled(folder: Path) -> OpenScorer:
    """Every prompt with its first token twice, as BOS from the template and from the tokenizer."""
    return edited(
        folder,
        lambda batch: [
            replace(sequence, prompt_token_ids=sequence.prompt_token_ids[:1] + sequence.prompt_token_ids)
            for sequence in batch
        ],
    )


def first_token(folder: Path, token: int) -> OpenScorer:
    """Every prompt with another first token."""
    return edited(
        folder,
        lambda batch: [
            replace(sequence, prompt_token_ids=[token, *sequence.prompt_token_ids[1:]]) for sequence in batch
        ],
    )


def edited(folder: Path, edit: Edit) -> OpenScorer:
    return lambda dtype, reference: opened(folder, dtype, reference=reference, edit=edit)


def left_padded(folder: Path, pad_id: int, share: float) -> OpenScorer:
    """Prompts padded on the left, the padding attended to, by `share` of what would align the batch."""

    def edit(batch: list[TokenSequence]) -> list[TokenSequence]:
        longest = max(sequence.num_tokens for sequence in batch)
        return [
            replace(
                sequence,
                prompt_token_ids=[pad_id] * round(share * (longest - sequence.num_tokens)) + sequence.prompt_token_ids,
            )
            for sequence in batch
        ]

    return edited(folder, edit)


def packed(folder: Path, per_row: int) -> OpenScorer:
    """`per_row` sequences in one row without boundaries: later ones attend to earlier ones."""

    def edit(batch: list[TokenSequence]) -> list[TokenSequence]:
        rows = []
        for index, sequence in enumerate(batch):
            before = batch[index - index % per_row : index]
            tokens = [token for other in before for token in (*other.prompt_token_ids, *other.token_ids)]
            rows.append(replace(sequence, prompt_token_ids=tokens + sequence.prompt_token_ids))
        return rows

    return edited(folder, edit)


def labels_off_by_one(folder: Path) -> OpenScorer:
    """Logits are read one position too late, so a token is scored after it was seen."""

    def late(*args: Any, **kwargs: Any) -> PaddedBatch:
        padded = pad_batch(*args, **kwargs)
        last = padded.input_ids_BS.shape[1] - 1
        return replace(padded, positions_T=(padded.positions_T + 1).clamp(max=last))

    @contextmanager
    def open_one(dtype: Dtype, reference: bool) -> Iterator[TrainingSide]:
        with padding_by(late), opened(folder, dtype, reference=reference) as side:
            yield side

    return open_one


@contextmanager
def padding_by(pad: Callable[..., PaddedBatch]) -> Iterator[None]:
    """Passes pad their batches with `pad` in place of the product's own function.

    Raises:
        AssertionError: no pass did, so that nothing was injected.
    """
    module: Any = passes
    own, num_calls = module.pad_batch, 0

    def counted(batch: Sequence[TokenSequence], **kwargs: Any) -> PaddedBatch:
        nonlocal num_calls
        num_calls += any(sequence.id for sequence in batch)  # a scorer's rehearsal has none
        return pad(batch, **kwargs)

    module.pad_batch = counted
    try:
        yield
    finally:
        module.pad_batch = own
    assert num_calls, "the passes of the training path no longer pad by `passes.pad_batch`"


def with_dropout(folder: Path, share: float) -> OpenScorer:
    """Dropout of `share` after every layer's feed-forward block, in every pass."""

    @contextmanager
    def open_one(dtype: Dtype, reference: bool) -> Iterator[TrainingSide]:
        with Scorer.load(folder, dtype, TrainingPathSettings(), reference=reference) as scorer:
            for name, module in scorer._model.named_modules():
                if name.endswith(".mlp"):
                    module.register_forward_hook(lambda _, __, out: torch.nn.functional.dropout(out, share))
            yield TrainingSide(scorer)

    return open_one


def with_other_config(folder: Path, target: Path, **changes: object) -> OpenScorer:
    """Another configuration of the forward pass on the training side."""
    return on(with_config(folder, target, **changes))


def on(folder: Path) -> OpenScorer:
    """The product's training path, on this checkpoint."""
    return lambda dtype, reference: opened(folder, dtype, reference=reference)


def other_weights(folder: Path, target: Path, size: float, only: str = "") -> Path:
    """A checkpoint some updates away: Gaussian changes of `size` times each tensor's own rms, where `only` is named."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * tensor.square().mean().sqrt() * size
        return torch.add(tensor, noise) if only in name else tensor

    return with_weights(folder, target, change)


def unmerged_adapter(folder: Path, target: Path, size: float, rank: int = 4) -> Path:
    """A checkpoint with a low-rank update of every query and value projection, `size` times its own rms."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not ("q_proj" in name or "v_proj" in name) or tensor.dim() != 2:
            return tensor
        up = torch.randn(tensor.shape[0], rank, generator=generator)
        down = torch.randn(rank, tensor.shape[1], generator=generator)
        return torch.add(tensor, up @ down / rank**0.5 * tensor.square().mean().sqrt() * size)

    return with_weights(folder, target, change)
