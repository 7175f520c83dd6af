"""Computes the FP32 reference on the recorded sides' tokens, place by place, and what each side's errors add up to.

A place that holds others is computed once more, where each of those errs as it did on the side: rounding that is
innocent in each adds up. What is left lies between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from mismatch_probe.records.activations import (
    BLOCK,
    HEAD,
    INFER,
    TRAIN,
    ActivationBatch,
    ActivationStore,
    PlaceSums,
    RouterSums,
    is_router,
    key,
    stored_keys,
)
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.inside.places import Visit, watch_places
from mismatch_probe.training_path.inside.recording import BatchPass, PassRows, score_pass
from mismatch_probe.training_path.inside.totals import Formats, OwnTarget, RowsSeen, SideTotals, SumsBySequence


def routers_differ(first_TE: Tensor, second_TE: Tensor, top_k: int) -> Tensor:
    """Whether the sets of the `top_k` largest router logits differ [T]."""
    first, second = (
        torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, logits_TE.topk(top_k).indices, True)
        for logits_TE in (first_TE, second_TE)
    )
    return (first != second).any(dim=1)


@dataclass(frozen=True)
class _Part:
    """A place that holds no other, with the own errors [T, C] of each side; `like` has the shape of what it returns."""

    layer: int | None
    place: str
    errors: dict[str, Tensor]
    like: Tensor


_EPSILONS_ARE_SMALL: Final = 1024.0
"""A size of numbers beside whose squares a norm's epsilon is lost in FP32."""
LayerPlace = tuple[int | None, str]
SideNames = tuple[str, str]


class ReferenceWalk:
    """One walk over all batches; `sides` are the two recorded ones, in the order in which results name them."""

    def __init__(
        self,
        model: PreTrainedModel,
        arithmetic: Arithmetic,
        store: ActivationStore,
        *,
        modules: bool,
        sides: SideNames = (INFER, TRAIN),
    ) -> None:
        self._model = model
        self._arithmetic = arithmetic
        self._store = store
        self._sides = sides
        self._modules = modules
        self._top_k: int | None = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        self._places: dict[LayerPlace, dict[str, SideTotals]] = {}
        self._between: dict[LayerPlace, SumsBySequence] = {}
        self._routers: dict[int, dict[str, Tensor]] = {}
        self._prefixes: set[int] = set()
        self._rows: dict[tuple[LayerPlace, str], RowsSeen] = {}
        self._parts: list[_Part] = []
        self._norm_weights: dict[LayerPlace, Tensor | None] = {}
        self._layers: dict[str, tuple[Path, safe_open]] = {}

    def run(self, batches: Sequence[ActivationBatch]) -> list[ScoredSequence]:
        """Go over all batches; the reference's own scores."""
        self._num_sequences = sum(len(batch.sequences) for batch in batches)
        scores: list[ScoredSequence] = []
        for batch in batches:
            self._batch = batch
            self._parts.clear()
            self._pass_rows = PassRows.of(batch, self._model.device)
            numbers = batch.first_sequence + torch.arange(len(batch.sequences))
            self._sequence_T = torch.repeat_interleave(numbers, torch.tensor(batch.rows_per_sequence))
            self._first_T = torch.tensor(
                [self._is_first(prefix) for sequence in batch.sequences for prefix in _prefixes(sequence)]
            )
            self._stream: dict[str, Tensor] = {
                side: self._read_tensors(side, None, [key(BLOCK, "in0")])[0] for side in self._sides
            }
            with self._arithmetic.active():
                with watch_places(self._model, self._on_visit, modules=self._modules) as self._watch:
                    batch_pass = BatchPass.run(self._model, batch)
                if self._modules:
                    self._visit_head(batch_pass)
                scores += score_pass(batch_pass)
        return scores

    def places(self) -> list[PlaceSums]:
        """Sums at every place that both sides recorded, in the order of the walk."""
        first, second = self._sides
        return [
            PlaceSums(*place, totals[first].finish(), totals[second].finish(), self._between[place].finish())
            for place, totals in self._places.items()
        ]

    def routers(self) -> list[RouterSums]:
        return [
            RouterSums(layer, *(sums[name].numpy() for name in ("tokens", *self._sides, "sides")))
            for layer, sums in self._routers.items()
        ]

    def _on_visit(self, visit: Visit) -> None:
        if not self._pass_rows.fits(visit.output):
            return
        target_TC = self._pass_rows.pack(visit.output)
        tensors: dict[str, Tensor] = {}
        own_targets: dict[str, OwnTarget] = {}
        parts = self._parts_inside(visit)
        norm_weights_C = self._weights_of_norm(visit)
        records = {side: self._read_place(side, visit) for side in self._sides}
        place = visit.layer, visit.place
        new_T = self._first_T
        for side, side_tensors in records.items():
            if side_tensors is None:
                return
            new_T = new_T & self._are_new(place, side, [*side_tensors[0], side_tensors[1]])
        for side, side_tensors in records.items():
            assert side_tensors is not None
            inputs, output, router_logits = side_tensors
            padded_inputs = [
                self._pass_rows.unpack(tensor, like) for tensor, like in zip(inputs, visit.inputs, strict=True)
            ]
            with_parts_TC = self._recompute_with_errors(visit, padded_inputs, parts, side) if parts else None
            self._watch.router_logits = None
            on_input_TC = self._pass_rows.pack(visit.recompute(padded_inputs)) if padded_inputs else target_TC
            tensors[side] = output.to(target_TC.device)
            deciding_logits = None if is_router(visit.place) else router_logits
            counted_T = new_T & self._same_experts(deciding_logits, len(target_TC))
            own_targets[side] = OwnTarget(on_input_TC, counted_T, with_parts_TC, norm_weights_C)
        if visit.takes_errors and visit.layer is not None and visit.place != BLOCK and not parts:
            errors_TC = {side: tensors[side].float() - own_targets[side].on_input_TC for side in self._sides}
            like = visit.output.new_empty(1).expand(visit.output.shape)
            self._parts.append(_Part(visit.layer, visit.place, errors_TC, like))
        self._add(place, self._sequence_T, target_TC, tensors, own_targets)
        if visit.layer is not None and is_router(visit.place) and self._top_k is not None:
            logits = {side: tensor.float() for side, tensor in tensors.items()}
            self._add_router(visit.layer, target_TC, logits, self._top_k)

    def _weights_of_norm(self, visit: Visit) -> Tensor | None:
        """What a norm multiplies its normalised numbers by [C], computed once: what it makes of equal numbers.

        None of a place that is none, or that does more than multiply: for the negative numbers it makes something else.
        """
        place = visit.layer, visit.place
        if place not in self._norm_weights:
            self._norm_weights[place] = None
            if "norm" in visit.place and len(visit.inputs) == 1:
                rows_TC, negative_TC = (
                    self._pass_rows.pack(
                        visit.recompute([torch.full_like(visit.inputs[0], sign * _EPSILONS_ARE_SMALL)])
                    )
                    for sign in (1, -1)
                )
                weights_C = rows_TC[0]
                if torch.allclose(rows_TC, weights_C) and torch.allclose(-negative_TC, weights_C):
                    self._norm_weights[place] = weights_C
        return self._norm_weights[place]

    def _parts_inside(self, visit: Visit) -> list[_Part]:
        """The places inside that were visited before; memory keeps one layer's."""
        if self._parts and self._parts[0].layer != visit.layer:
            self._parts.clear()
        prefix = "" if visit.place == BLOCK else f"{visit.place}."
        return [part for part in self._parts if part.place.startswith(prefix)]

    def _recompute_with_errors(
        self, visit: Visit, padded_inputs: Sequence[Tensor], parts: Sequence[_Part], side: str
    ) -> Tensor:
        errors = {part.place: self._pass_rows.unpack(part.errors[side], part.like) for part in parts}
        with self._watch.erring(errors):
            return self._pass_rows.pack(visit.recompute(padded_inputs))

    def _read_place(self, side: str, visit: Visit) -> tuple[list[Tensor], Tensor, Tensor | None] | None:
        """What a side was given at a place and returned, and its layer's router logits; None without a record."""
        tensors = self._open_layer(side, visit.layer)
        names = set(tensors.keys())
        router = next((name for name in names if name.endswith(".out") and is_router(name[: -len(".out")])), None)
        router_logits = None if router is None else tensors.get_tensor(router)
        if visit.place == BLOCK:
            inputs, self._stream[side] = [self._stream[side]], tensors.get_tensor(key(BLOCK, "out"))
            return inputs, self._stream[side], router_logits
        keys, out_key = stored_keys(visit.place, names)
        keys = keys if visit.inputs else []
        if not {*keys, out_key} <= names:
            return None
        return [tensors.get_tensor(row_key) for row_key in keys], tensors.get_tensor(out_key), router_logits

    def _same_experts(self, router_logits_TE: Tensor | None, num_rows: int) -> Tensor:
        """Tokens [T] that FP32, computing the place again on the side's input, sends to the side's own experts."""
        reference_logits = self._watch.router_logits
        if reference_logits is None or router_logits_TE is None or self._top_k is None:
            return torch.ones(num_rows, dtype=torch.bool)
        return ~routers_differ(router_logits_TE.float(), self._pass_rows.pack(reference_logits).cpu(), self._top_k)

    def _visit_head(self, batch_pass: BatchPass) -> None:
        """Logits of the chosen rows: a vocabulary's width is too much for all."""
        rows = self._batch.logit_rows
        for side in self._sides:
            if key(HEAD, "out") not in self._open_layer(side, None).keys():  # noqa: SIM118 - not a mapping
                return
        hidden_TD = batch_pass.hidden_rows(self._pass_rows)
        target_TV = batch_pass.head.logits(hidden_TD[rows])
        logits: dict[str, Tensor] = {}
        inputs = {side: self._read_tensors(side, None, [key(HEAD, "in0")])[0] for side in self._sides}
        new_T = self._first_T[rows]
        for side, inputs_TD in inputs.items():
            new_T = new_T & self._are_new((None, HEAD), side, [inputs_TD])
        own_targets: dict[str, OwnTarget] = {}
        for side, inputs_TD in inputs.items():
            own_target_TV = batch_pass.head.logits(inputs_TD.to(hidden_TD.device, hidden_TD.dtype))
            own_targets[side] = OwnTarget(own_target_TV, new_T)
            (output,) = self._read_tensors(side, None, [key(HEAD, "out")])
            logits[side] = output.to(target_TV.device)[:, : target_TV.shape[1]]
        self._add((None, HEAD), self._sequence_T[rows], target_TV, logits, own_targets)

    def _are_new(self, place: LayerPlace, side: str, tensors: Sequence[Tensor]) -> Tensor:
        """Tokens [T] that the side did not compute before from the same numbers to the same numbers.

        Where responses repeat one id, all of their tokens are one draw of rounding.
        """
        with _disable_current_modes():
            return self._rows.setdefault((place, side), RowsSeen()).are_new(tensors)

    def _is_first(self, prefix: int) -> bool:
        """Whether no earlier token was computed on the same ids; what all prompts begin with is seen once."""
        is_first = prefix not in self._prefixes
        self._prefixes.add(prefix)
        return is_first

    def _add(
        self,
        place: LayerPlace,
        sequence_T: Tensor,
        target_TC: Tensor,
        tensors: dict[str, Tensor],
        own_targets: dict[str, OwnTarget],
    ) -> None:
        """`tensors` are in the format that each side computes in.

        No matrices are multiplied, so the arithmetic of products need not look at each of very many operations.
        """
        if place not in self._places:
            self._between[place] = SumsBySequence(self._num_sequences)
            self._places[place] = {side: SideTotals(self._num_sequences, target_TC.shape[1]) for side in self._sides}
        first, second = self._sides
        coarser = max((tensors[side].dtype for side in self._sides), key=lambda dtype: torch.finfo(dtype).eps)
        with _disable_current_modes():
            for side, totals in self._places[place].items():
                formats = Formats(tensors[side].dtype, coarser)
                totals.add(sequence_T, tensors[side].float(), target_TC, own_targets[side], formats)
            self._between[place].add(sequence_T, tensors[second].float(), tensors[first].float())

    def _add_router(self, layer: int, target_TE: Tensor, tensors: dict[str, Tensor], top_k: int) -> None:
        sums = self._routers.setdefault(layer, {})
        first, second = self._sides
        shares = {
            "tokens": torch.ones(len(target_TE)),
            **{side: routers_differ(tensors[side], target_TE, top_k) for side in self._sides},
            "sides": routers_differ(tensors[first], tensors[second], top_k),
        }
        for name, share_T in shares.items():
            total = sums.setdefault(name, torch.zeros(self._num_sequences, dtype=torch.float64))
            total.index_add_(0, self._sequence_T, share_T.double().cpu())

    def _open_layer(self, side: str, layer: int | None) -> safe_open:
        """What a side recorded in a layer, which is opened once for all of its places."""
        path = self._store.file(side, self._batch.number, layer)
        if side not in self._layers or self._layers[side][0] != path:
            self._layers[side] = path, safe_open(path, framework="pt")
        return self._layers[side][1]

    def _read_tensors(self, side: str, layer: int | None, keys: list[str]) -> list[Tensor]:
        tensors = self._open_layer(side, layer)
        return [tensors.get_tensor(row_key) for row_key in keys]


def _prefixes(sequence: TokenSequence) -> Iterator[int]:
    """A hash of the ids up to each token but the last."""
    prefix = 0
    for token_id in [*sequence.prompt_token_ids, *sequence.token_ids][:-1]:
        prefix = hash((prefix, token_id))
        yield prefix
