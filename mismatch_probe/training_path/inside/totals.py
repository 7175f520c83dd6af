# mypy: allow-untyped-calls
"""Computes the FP32 reference on the recorded sides' tokens, and the sums from which all errors follow.

A side has two errors. Its total error is its output minus the reference's; its own error is its output minus the FP32
output from this side's input. The second is what the place adds; it needs no model of how errors travel.

Pretrained models have tokens and channels of thousands of times the usual size (massive activations and attention
sinks; Sun et al., "Massive activations in large language models", 2024, section 2). In a plain sum of squares one such
number, rounded with luck, outweighs all others. So errors are relative to the size of a token or number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from mismatch_probe.records.sequences import (
    BLOCK,
    HEAD,
    INFER,
    TRAIN,
    ActivationBatch,
    ActivationStore,
    ErrorSums,
    OwnSums,
    PlaceSums,
    RouterSums,
    ScoredSequence,
    SideSums,
    TokenSequence,
    is_router,
    key,
    stored_keys,
)
from mismatch_probe.training_path.arithmetic import Arithmetic
from mismatch_probe.training_path.inside.places import Visit, watch_places
from mismatch_probe.training_path.inside.recording import BatchPass, PassRows, score_pass

_MOST_SPACINGS: Final = 1.02
"""By which a faithful number differs: sums of FP32 that end on the other side of a neighbour are let pass."""
_MAX_NUMBERS: Final = 1 << 23
"""The most logits that are computed at a time: those of many tokens take gigabytes."""


class SumsBySequence:
    """A side's outputs against a target, relative to the target token by token, summed by sequence [N] in FP64."""

    def __init__(self, num_sequences: int) -> None:
        self._sums = torch.zeros(5, num_sequences, dtype=torch.float64)
        self._largest = 0.0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor) -> None:
        """Add a batch's tokens. Where a token's target is zero, the side's output is its error and its size."""
        error_TC = side_TC - target_TC
        target_T, side_T, error_T = (
            tensor_TC.square().sum(dim=1).double() for tensor_TC in (target_TC, side_TC, error_TC)
        )
        along_T = (error_TC * target_TC).sum(dim=1).double()
        size_T = torch.where(target_T > 0, target_T, side_T)
        size_T = torch.where(size_T > 0, size_T, torch.ones_like(size_T))
        terms = (torch.ones_like(size_T), target_T / size_T, side_T / size_T, error_T / size_T, along_T / size_T)
        for sums, term_T in zip(self._sums, terms, strict=True):
            sums.index_add_(0, sequence_T, term_T.cpu())
        largest_T = error_TC.abs().amax(dim=1).double() / (size_T / target_TC.shape[1]).sqrt()
        self._largest = max(self._largest, float(largest_T.max()))

    def finish(self) -> ErrorSums:
        tokens, target, side, error, along = (sums.numpy() for sums in self._sums)
        return ErrorSums(tokens, target, side, error, along, torch.tensor([self._largest]).double().numpy())


@dataclass(frozen=True)
class Formats:
    """A side's format at a place, and the coarser of both sides' there."""

    own: torch.dtype
    coarser: torch.dtype

    @property
    def smallest(self) -> float:
        """Normal number, below which the side's format rounds by a fixed amount."""
        return torch.finfo(self.own).smallest_normal

    def spacing(self, numbers: Tensor) -> Tensor:
        """From each number to the next larger one of its binade, in the side's format."""
        exponents = torch.frexp(numbers.abs().clamp_min(self.smallest)).exponent
        return torch.ldexp(torch.full_like(numbers, torch.finfo(self.own).eps), exponents - 1)

    def nearest_errors(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.coarser).float() - numbers


class OwnTotals:
    """Own errors of one side at one place, relative to each number's own size and to its token's mean size.

    Rounding makes such an error about equally large in every number, and bounds each. Where a token's target is zero
    everywhere, an error is relative to itself.
    """

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._channels = torch.zeros(6, num_channels, dtype=torch.float64)
        self._sequences = torch.zeros(2, num_sequences, dtype=torch.float64)
        self._moments = torch.zeros(3, dtype=torch.float64)
        self._tokens = 0

    def add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, formats: Formats) -> None:
        at_a_time = max(_MAX_NUMBERS // target_TC.shape[1], 1)
        for sequence, side, target in zip(
            sequence_T.split(at_a_time), side_TC.split(at_a_time), target_TC.split(at_a_time), strict=True
        ):
            self._add(sequence, side, target, formats)
        self._tokens += len(sequence_T)

    def _add(self, sequence_T: Tensor, side_TC: Tensor, target_TC: Tensor, formats: Formats) -> None:
        error_TC = side_TC - target_TC
        mean_size_T1 = target_TC.abs().mean(dim=1, keepdim=True)
        size_TC = torch.where(mean_size_T1 > 0, target_TC.hypot(mean_size_T1), error_TC.abs()).clamp_min(
            formats.smallest
        )
        relative_TC, share_TC = error_TC / size_TC, target_TC / size_TC
        squares_TC, along_TC, target_squares_TC = relative_TC.square(), relative_TC * share_TC, share_TC.square()
        is_unfaithful_TC = error_TC.abs() > _MOST_SPACINGS * formats.spacing(target_TC)
        nearest_TC = (formats.nearest_errors(target_TC) / size_TC).square()
        judged = (squares_TC.square(), squares_TC * is_unfaithful_TC, nearest_TC)
        by_channel = (squares_TC, *judged, along_TC, target_squares_TC)
        for sums, term_TC in zip(self._channels, by_channel, strict=True):
            sums += term_TC.sum(dim=0).double().cpu()
        along_T, targets_T = (term_TC.sum(dim=1).double().cpu() for term_TC in (along_TC, target_squares_TC))
        for sums, term_T in zip(self._sequences, (along_T, targets_T), strict=True):
            sums.index_add_(0, sequence_T, term_T)
        self._moments += torch.stack([along_T @ along_T, along_T @ targets_T, targets_T @ targets_T])

    def finish(self) -> OwnSums:
        squares, fourths, unfaithful, nearest, along, targets = self._channels.numpy()
        sequence_along, sequence_targets = self._sequences.numpy()
        return OwnSums(
            tokens=torch.tensor([self._tokens]).double().numpy(),
            squares=squares,
            fourths=fourths,
            unfaithful=unfaithful,
            nearest=nearest,
            along=along,
            targets=targets,
            sequence_along=sequence_along,
            sequence_targets=sequence_targets,
            token_moments=self._moments.numpy(),
        )


@dataclass(frozen=True)
class OwnTarget:
    """What FP32 makes of a side's own input, and what it makes of it where each place inside errs as it did on that
    side: what a place with others inside adds to their errors. Only the tokens of `counted_T` count in sums by number.
    """

    on_input_TC: Tensor
    on_parts_TC: Tensor
    counted_T: Tensor


class SideTotals:
    """One side at one place, compared with the reference and with FP32 on this side's own input."""

    def __init__(self, num_sequences: int, num_channels: int) -> None:
        self._total = SumsBySequence(num_sequences)
        self._own = SumsBySequence(num_sequences)
        self._own_by_number = OwnTotals(num_sequences, num_channels)

    def add(
        self,
        sequence_T: Tensor,
        side_TC: Tensor,
        target_TC: Tensor,
        own: "OwnTarget",
        formats: Formats,
    ) -> None:
        self._total.add(sequence_T, side_TC, target_TC)
        self._own.add(sequence_T, side_TC, own.on_input_TC)
        counted_T = own.counted_T
        self._own_by_number.add(sequence_T[counted_T], side_TC[counted_T], own.on_parts_TC[counted_T], formats)

    def finish(self) -> SideSums:
        return SideSums(self._total.finish(), self._own.finish(), self._own_by_number.finish())


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


LayerPlace = tuple[int | None, str]
SideNames = tuple[str, str]


class ReferenceWalk:
    """One pass of the reference over all batches; `sides` are the two recorded ones, in the order of the results."""

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
        self._parts: list[_Part] = []

    def run(self, batches: Sequence[ActivationBatch]) -> list[ScoredSequence]:
        """Compute all batches; returns the reference's own scores."""
        self._num_sequences = sum(len(batch.sequences) for batch in batches)
        scores: list[ScoredSequence] = []
        for batch in batches:
            self._batch = batch
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
        errors_inside = self._errors_inside(visit)
        for side in self._sides:
            side_tensors = self._read_place(side, visit)
            if side_tensors is None:
                return
            inputs, output, router_logits = side_tensors
            padded_inputs = [
                self._pass_rows.unpack(tensor, like) for tensor, like in zip(inputs, visit.inputs, strict=True)
            ]
            self._watch.router_logits = None
            on_input_TC = self._pass_rows.pack(visit.recompute(padded_inputs)) if padded_inputs else target_TC
            on_parts_TC = on_input_TC
            if errors := errors_inside[side]:
                with self._watch.erring(errors):
                    on_parts_TC = self._pass_rows.pack(visit.recompute(padded_inputs))
            tensors[side] = output.to(target_TC.device)
            deciding_logits = None if is_router(visit.place) else router_logits
            counted_T = self._first_T & self._same_experts(deciding_logits, len(target_TC))
            own_targets[side] = OwnTarget(on_input_TC, on_parts_TC, counted_T)
        if visit.takes_errors and not any(errors_inside.values()):
            errors_TC = {side: tensors[side].float() - own_targets[side].on_input_TC for side in self._sides}
            like = visit.output.new_empty(1).expand(visit.output.shape)
            self._parts.append(_Part(visit.layer, visit.place, errors_TC, like))
        self._add((visit.layer, visit.place), self._sequence_T, target_TC, tensors, own_targets)
        if visit.layer is not None and is_router(visit.place) and self._top_k is not None:
            logits = {side: tensor.float() for side, tensor in tensors.items()}
            self._add_router(visit.layer, target_TC, logits, self._top_k)

    def _errors_inside(self, visit: Visit) -> dict[str, dict[str, Tensor]]:
        """Own errors of each side at the places inside, shaped like what these return."""
        if self._parts and self._parts[0].layer != visit.layer:
            self._parts.clear()
        prefix = "" if visit.place == BLOCK else f"{visit.place}."
        inside = [part for part in self._parts if visit.layer is not None and part.place.startswith(prefix)]
        return {
            side: {part.place: self._pass_rows.unpack(part.errors[side], part.like) for part in inside}
            for side in self._sides
        }

    def _read_place(self, side: str, visit: Visit) -> tuple[list[Tensor], Tensor, Tensor | None] | None:
        """A side's inputs and output at a place, and its layer's router logits; None without a record."""
        with self._open_layer(side, visit.layer) as tensors:
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
        """The mask [T] of tokens for which FP32 on the side's input takes the side's own experts."""
        reference_logits = self._watch.router_logits
        if reference_logits is None or router_logits_TE is None or self._top_k is None:
            return torch.ones(num_rows, dtype=torch.bool)
        return ~routers_differ(router_logits_TE.float(), self._pass_rows.pack(reference_logits).cpu(), self._top_k)

    def _visit_head(self, batch_pass: BatchPass) -> None:
        """Add the logits of the chosen rows; those of all rows would be too many."""
        rows = self._batch.logit_rows
        for side in self._sides:
            with self._open_layer(side, None) as tensors:
                if key(HEAD, "out") not in tensors.keys():  # noqa: SIM118 - not a mapping
                    return
        hidden_TD = batch_pass.hidden_rows(self._pass_rows)
        target_TV = batch_pass.head.logits(hidden_TD[rows])
        logits: dict[str, Tensor] = {}
        own_targets: dict[str, OwnTarget] = {}
        for side in self._sides:
            inputs, output = self._read_tensors(side, None, [key(HEAD, "in0"), key(HEAD, "out")])
            own_target_TV = batch_pass.head.logits(inputs.to(hidden_TD.device, hidden_TD.dtype))
            own_targets[side] = OwnTarget(own_target_TV, own_target_TV, self._first_T[rows])
            logits[side] = output.to(target_TV.device)[:, : target_TV.shape[1]]
        self._add((None, HEAD), self._sequence_T[rows], target_TV, logits, own_targets)

    def _is_first(self, prefix: int) -> bool:
        """Whether no earlier token has the same prefix of ids, so that a common beginning of prompts counts once."""
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
        """tensors: in the format of each side."""
        if place not in self._places:
            self._between[place] = SumsBySequence(self._num_sequences)
            self._places[place] = {side: SideTotals(self._num_sequences, target_TC.shape[1]) for side in self._sides}
        first, second = self._sides
        coarser = max((tensors[side].dtype for side in self._sides), key=lambda dtype: torch.finfo(dtype).eps)
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
        return safe_open(self._store.file(side, self._batch.number, layer), framework="pt")

    def _read_tensors(self, side: str, layer: int | None, keys: list[str]) -> list[Tensor]:
        with self._open_layer(side, layer) as tensors:
            return [tensors.get_tensor(row_key) for row_key in keys]


def _prefixes(sequence: TokenSequence) -> Iterator[int]:
    """A hash of the ids up to each token but the last."""
    prefix = 0
    for token_id in [*sequence.prompt_token_ids, *sequence.token_ids][:-1]:
        prefix = hash((prefix, token_id))
        yield prefix
