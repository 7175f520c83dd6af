# mypy: allow-untyped-calls

"""The FP32 reference goes over the same tokens and at every place holds the recorded sides against itself.

Two errors of a side: its total error is its output less the reference's; its own error is its output less what FP32
makes of this side's own input. The second is what the place adds; it needs no model of how errors travel.
"""

from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from mismatch_probe.records.activations import BLOCK, HEAD, ActivationBatch, ActivationStore, key, stored_keys
from mismatch_probe.records.sequences import ScoredSequence
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.inside.places import Visit, visited
from mismatch_probe.training_path.inside.rows import Layout
from mismatch_probe.training_path.inside.scoring import BatchPass, score_pass
from mismatch_probe.training_path.inside.totals import RouterTotals, SideTotals, Sums, other_experts

Place = tuple[int | None, str]


class ReferenceWalk:
    """Totals over all batches in `places`, of the sides against each other in `between`, and of routers."""

    def __init__(
        self,
        model: PreTrainedModel,
        arithmetic: Arithmetic,
        store: ActivationStore,
        sides: tuple[str, str],
        *,
        modules: bool,
    ) -> None:
        self._model = model
        self._arithmetic = arithmetic
        self._store = store
        self._sides = sides
        self._modules = modules
        self._top_k: int | None = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        self.places: dict[Place, dict[str, SideTotals]] = {}
        self.between: dict[Place, Sums] = {}
        self.routers: dict[int, RouterTotals] = {}

    def run(self, batches: Sequence[ActivationBatch]) -> list[ScoredSequence]:
        """Go over all batches; the reference's own scores."""
        self._num_sequences = sum(len(batch.sequences) for batch in batches)
        scored: list[ScoredSequence] = []
        for batch in batches:
            self._batch = batch
            self._layout = Layout.of(batch, self._model.device)
            numbers = batch.first_sequence + torch.arange(len(batch.sequences))
            self._sequence_T = torch.repeat_interleave(numbers, torch.tensor(batch.rows_per_sequence))
            self._stream: dict[str, Tensor] = {
                side: self._read(side, None, [key(BLOCK, "in0")])[0].float() for side in self._sides
            }
            with self._arithmetic.active():
                with visited(self._model, self._on_visit, modules=self._modules):
                    done = BatchPass.run(self._model, batch)
                if self._modules:
                    self._visit_head(done)
                scored += score_pass(done)
        return scored

    def _on_visit(self, visit: Visit) -> None:
        if not self._layout.fits(visit.returned):
            return
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for side in self._sides:
            if visit.place == BLOCK:
                given = [self._stream[side]]
                (returned,) = self._read(side, visit.layer, [key(BLOCK, "out")])
                self._stream[side] = returned.float()
            else:
                with self._open(side, visit.layer) as tensors:
                    keys, out = stored_keys(visit.place, tensors.keys())
                    if not {*keys, out} <= set(tensors.keys()) or not visit.given:
                        return
                    given, returned = [tensors.get_tensor(one) for one in keys], tensors.get_tensor(out)
            padded = [self._layout.unpack(one, like) for one, like in zip(given, visit.given, strict=True)]
            own_target = self._layout.pack(visit.recompute(padded))
            found[side] = returned.to(own_target.device, torch.float32), own_target
        self._add((visit.layer, visit.place), self._layout.pack(visit.returned), found, self._sequence_T)

    def _visit_head(self, done: BatchPass) -> None:
        """Logits of the chosen rows: a vocabulary's width is too much for all."""
        rows = self._batch.logit_rows
        if not rows:
            return
        hidden_TD = done.hidden_rows(self._layout)
        found = {}
        for side in self._sides:
            given, returned = self._read(side, None, [key(HEAD, "in0"), key(HEAD, "out")])
            target = done.head.logits(given.to(hidden_TD.device, hidden_TD.dtype))
            found[side] = returned.to(target.device, torch.float32)[:, : target.shape[1]], target
        self._add((None, HEAD), done.head.logits(hidden_TD[rows]), found, self._sequence_T[rows])

    def _add(
        self, place: Place, target_TC: Tensor, found: dict[str, tuple[Tensor, Tensor]], sequence_T: Tensor
    ) -> None:
        totals = self.places.setdefault(place, {})
        for side, (returned_TC, own_target_TC) in found.items():
            if side not in totals:
                totals[side] = SideTotals(Sums.zeros(self._num_sequences), Sums.zeros(self._num_sequences))
            totals[side].total.add(sequence_T, returned_TC, target_TC)
            own_error_TC = totals[side].own.add(sequence_T, returned_TC, own_target_TC)
            totals[side].add_channels(own_error_TC, own_target_TC)
        first, second = (found[side][0] for side in self._sides)
        between = self.between.setdefault(place, Sums.zeros(self._num_sequences))
        between.add(sequence_T, second, first)
        if self._is_router(place, target_TC):
            self._add_router(place, target_TC, found, sequence_T)

    def _is_router(self, place: Place, logits_TE: Tensor) -> bool:
        layer, name = place
        return (
            self._top_k is not None
            and layer is not None
            and name.rpartition(".")[2] in ("gate", "router")
            and logits_TE.shape[1] > self._top_k
        )

    def _add_router(
        self, place: Place, logits_TE: Tensor, found: dict[str, tuple[Tensor, Tensor]], sequence_T: Tensor
    ) -> None:
        layer, _ = place
        assert layer is not None
        assert self._top_k is not None
        totals = self.routers.setdefault(layer, RouterTotals(torch.zeros(self._num_sequences, dtype=torch.float64)))
        totals.tokens.index_add_(0, sequence_T, torch.ones_like(sequence_T, dtype=torch.float64))
        for side, (returned, own_target) in found.items():
            totals.add(side, sequence_T, other_experts(returned, logits_TE, self._top_k))
            totals.add(f"{side} own", sequence_T, other_experts(returned, own_target, self._top_k))
        first, second = (found[side][0] for side in self._sides)
        totals.add("sides", sequence_T, other_experts(first, second, self._top_k))

    def _open(self, side: str, layer: int | None) -> safe_open:
        return safe_open(self._store.file(side, self._batch.number, layer), framework="pt")

    def _read(self, side: str, layer: int | None, keys: list[str]) -> list[Tensor]:
        with self._open(side, layer) as tensors:
            return [tensors.get_tensor(one) for one in keys]
