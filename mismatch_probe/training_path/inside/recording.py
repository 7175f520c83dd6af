"""Records what the training path computes inside a model: hidden states, activations, the choice of experts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from mismatch_probe.errors import RoutingUnseen
from mismatch_probe.records.activations import (
    ACTIVATION,
    BLOCK,
    HEAD,
    ROTARY_KEYS,
    ROTARY_QUERIES,
    TRAIN,
    ActivationBatch,
    ActivationStore,
    key,
)
from mismatch_probe.records.legs import SequenceRouting, by_sequence
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.batching import ChunkedHead, PaddedBatch, pad_batch, score_hidden_states
from mismatch_probe.training_path.inside.places import Visit, watch_places
from mismatch_probe.training_path.precision import undivided_modules


@dataclass(frozen=True)
class PassRows:
    """The place of each token's row in a right-padded pass [B, S]."""

    rows_T: Tensor
    columns_T: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, batch: ActivationBatch, device: torch.device) -> "PassRows":
        counts = batch.rows_per_sequence
        rows_T = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        columns_T = torch.cat([torch.arange(count) for count in counts])
        return cls(rows_T.to(device), columns_T.to(device), (len(counts), max(counts)))

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has a row for each token of the pass."""
        rows, width = self.shape
        return tuple(tensor.shape[:2]) == self.shape or (tensor.dim() == 2 and tensor.shape[0] == rows * width)

    def pack(self, tensor: Tensor) -> Tensor:
        """Rows [T, C] of [B, S, ...] or of what a module has flattened to [B * S, C]."""
        return self._view_as_batch(tensor)[self.rows_T.to(tensor.device), self.columns_T.to(tensor.device)].flatten(1)

    def unpack(self, rows_TC: Tensor, like: Tensor) -> Tensor:
        """Rows in the shape, dtype and device of `like`; zero in the padding."""
        result = torch.zeros_like(like, memory_format=torch.contiguous_format)
        view = self._view_as_batch(result)
        at = self.rows_T.to(like.device), self.columns_T.to(like.device)
        view[at] = rows_TC.to(like.device, like.dtype).view(-1, *view.shape[2:])
        return result

    def _view_as_batch(self, tensor: Tensor) -> Tensor:
        """A view [B, S, ...]."""
        return tensor if tuple(tensor.shape[:2]) == self.shape else tensor.view(*self.shape, *tensor.shape[1:])


@dataclass(frozen=True)
class BatchPass:
    """A batch after the forward pass of a model's body."""

    batch: ActivationBatch
    padded_batch: PaddedBatch
    head: ChunkedHead
    hidden_BSD: Tensor
    vocab_size: int

    @classmethod
    def run(cls, model: PreTrainedModel, batch: ActivationBatch) -> "BatchPass":
        """Run the body on a batch; the arithmetic must be active."""
        embeddings: Any = model.get_input_embeddings()
        vocab_size: int = embeddings.weight.shape[0]
        padded_batch = pad_batch(batch.sequences, vocab_size=vocab_size)
        head = ChunkedHead(model)
        return cls(batch, padded_batch, head, head.body(padded_batch.input_ids_BS.to(model.device)), vocab_size)

    def hidden_rows(self, layout: PassRows) -> Tensor:
        """Final hidden states [T, D], one row a token."""
        return layout.pack(self.hidden_BSD)


def score_pass(batch_pass: BatchPass, *, log_softmax_dtype: torch.dtype = torch.float32) -> list[ScoredSequence]:
    """Log-probs of the responses' tokens at temperature 1, through the model's own head."""
    device = batch_pass.hidden_BSD.device
    scores = score_hidden_states(
        batch_pass.head,
        batch_pass.hidden_BSD[
            batch_pass.padded_batch.rows_T.to(device), batch_pass.padded_batch.positions_T.to(device)
        ],
        batch_pass.padded_batch.targets_T.to(device),
        vocab_size=batch_pass.vocab_size,
        temperature=1.0,
        log_softmax_dtype=log_softmax_dtype,
    )
    logprobs = scores.logprobs_T.cpu().split(batch_pass.padded_batch.response_lengths)
    return [
        ScoredSequence(sequence.id, values.numpy())
        for sequence, values in zip(batch_pass.batch.sequences, logprobs, strict=True)
    ]


_NOT_STORED_HERE = (ACTIVATION, ROTARY_QUERIES, ROTARY_KEYS)


def record_activations(
    model: PreTrainedModel,
    arithmetic: Arithmetic,
    batches: Sequence[ActivationBatch],
    store: ActivationStore,
    *,
    modules: bool,
    side: str = TRAIN,
) -> list[ScoredSequence]:
    """Score the batches and record each as `side`; the scores of all sequences in order.

    Memory holds one layer's tensors of one batch beside the model.
    """
    scores: list[ScoredSequence] = []
    for batch in batches:
        recorder = _ActivationRecorder(batch, store, side, model.device)
        with watch_places(model, recorder.on_visit, modules=modules), arithmetic.active():
            batch_pass = BatchPass.run(model, batch)
        if modules and batch.logit_rows:
            with arithmetic.active():
                recorder.keep_logits(batch_pass)
        recorder.finish()
        with arithmetic.active():
            scores += score_pass(batch_pass)
    return scores


class _ActivationRecorder:
    def __init__(self, batch: ActivationBatch, store: ActivationStore, side: str, device: torch.device) -> None:
        self._batch = batch
        self._store = store
        self._side = side
        self._pass_rows = PassRows.of(batch, device)
        self._layer: dict[str, Tensor] = {}
        self._outside_layers: dict[str, Tensor] = {}
        store.file(side, batch.number, None).parent.mkdir(parents=True)

    def on_visit(self, visit: Visit) -> None:
        if visit.place in _NOT_STORED_HERE or not self._pass_rows.fits(visit.output):
            return
        into = self._outside_layers if visit.layer is None else self._layer
        into[key(visit.place, "out")] = self._without_padding(visit.output)
        if visit.place != BLOCK:
            for number, tensor in enumerate(visit.inputs):
                into[key(visit.place, f"in{number}")] = self._without_padding(tensor)
            return
        if visit.layer == 0:
            self._outside_layers[key(BLOCK, "in0")] = self._without_padding(visit.inputs[0])
        save_file(self._layer, self._store.file(self._side, self._batch.number, visit.layer))
        self._layer = {}

    def keep_logits(self, batch_pass: BatchPass) -> None:
        hidden_TD = batch_pass.hidden_rows(self._pass_rows)[self._batch.logit_rows]
        self._outside_layers[key(HEAD, "in0")] = hidden_TD.cpu().contiguous()
        self._outside_layers[key(HEAD, "out")] = batch_pass.head.logits(hidden_TD).cpu().contiguous()

    def finish(self) -> None:
        save_file(self._outside_layers, self._store.file(self._side, self._batch.number, None))

    def _without_padding(self, tensor: Tensor) -> Tensor:
        return self._pass_rows.pack(tensor).to("cpu", copy=True).contiguous()


_EXPERTS: Final = "experts"
ExpertChoice = tuple[Tensor, Tensor]


def record_routing(model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[SequenceRouting]:
    """Run the sequences in one pass in the active arithmetic, and record every router's choice.

    Raises:
        RoutingUnseen: the model gives no choice of experts to a module of that name.
    """
    batch = ActivationBatch(0, 0, list(sequences), [])
    layout = PassRows.of(batch, model.device)
    with _keep_choices(model) as choice_of_layer:
        BatchPass.run(model, batch)
    if not choice_of_layer:
        raise RoutingUnseen(
            f"{type(model).__name__} hands no choice of experts to a module called {_EXPERTS}, so it cannot be read; "
            "a dense model has none"
        )
    layers = tuple(sorted(choice_of_layer))
    experts_LTK, weights_LTK = (
        torch.stack([layout.pack(choice_of_layer[layer][part]).cpu() for layer in layers]) for part in range(2)
    )
    return by_sequence(sequences, layers, experts_LTK.int().numpy(), weights_LTK.float().numpy())


@contextmanager
def _keep_choices(model: PreTrainedModel) -> Iterator[dict[int, ExpertChoice]]:
    """The ids and weights of experts in the last pass, by layer."""
    choice_of_layer: dict[int, ExpertChoice] = {}
    with ExitStack() as stack:
        for number, layer in enumerate(undivided_modules(model)):
            for path, module in layer.named_modules():
                if path.rpartition(".")[2] == _EXPERTS:
                    handle = module.register_forward_pre_hook(_hook_keeping(choice_of_layer, number), with_kwargs=True)
                    stack.callback(handle.remove)
        yield choice_of_layer


def _hook_keeping(choice_of_layer: dict[int, ExpertChoice], layer: int) -> Any:
    def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        ids = next((tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2), None)
        if ids is not None:
            weights = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.shape == ids.shape)
            choice_of_layer[layer] = ids.detach().clone(), next(weights).detach().clone()

    return keep
