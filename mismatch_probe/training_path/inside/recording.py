# mypy: allow-untyped-calls

"""Activations of the training path on given token ids, written while it scores them."""

from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

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
from mismatch_probe.records.sequences import ScoredSequence
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.inside.places import Visit, visited
from mismatch_probe.training_path.inside.rows import Layout
from mismatch_probe.training_path.inside.scoring import BatchPass, score_pass

_STORED_ELSEWHERE = (ACTIVATION, ROTARY_QUERIES, ROTARY_KEYS)


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
    scored: list[ScoredSequence] = []
    for batch in batches:
        recorder = _Recorder(batch, store, side, model.device)
        with visited(model, recorder.on_visit, modules=modules), arithmetic.active():
            done = BatchPass.run(model, batch)
        if modules and batch.logit_rows:
            with arithmetic.active():
                recorder.keep_logits(done)
        recorder.finish()
        with arithmetic.active():
            scored += score_pass(done)
    return scored


class _Recorder:
    def __init__(self, batch: ActivationBatch, store: ActivationStore, side: str, device: torch.device) -> None:
        self._batch = batch
        self._store = store
        self._side = side
        self._layout = Layout.of(batch, device)
        self._layer: dict[str, Tensor] = {}
        self._outside: dict[str, Tensor] = {}
        store.file(side, batch.number, None).parent.mkdir(parents=True)

    def on_visit(self, visit: Visit) -> None:
        if visit.place in _STORED_ELSEWHERE or not self._layout.fits(visit.returned):
            return
        into = self._outside if visit.layer is None else self._layer
        into[key(visit.place, "out")] = self._packed(visit.returned)
        if visit.place != BLOCK:
            for number, tensor in enumerate(visit.given):
                into[key(visit.place, f"in{number}")] = self._packed(tensor)
            return
        if visit.layer == 0:
            self._outside[key(BLOCK, "in0")] = self._packed(visit.given[0])
        save_file(self._layer, self._store.file(self._side, self._batch.number, visit.layer))
        self._layer = {}

    def keep_logits(self, done: BatchPass) -> None:
        hidden_TD = done.hidden_rows(self._layout)[self._batch.logit_rows]
        self._outside[key(HEAD, "in0")] = hidden_TD.cpu().contiguous()
        self._outside[key(HEAD, "out")] = done.head.logits(hidden_TD).cpu().contiguous()

    def finish(self) -> None:
        save_file(self._outside, self._store.file(self._side, self._batch.number, None))

    def _packed(self, padded: Tensor) -> Tensor:
        return self._layout.pack(padded).to("cpu", copy=True).contiguous()
