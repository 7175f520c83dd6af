"""What of an engine's recorded choices a trainer can replay: the experts of each token, and the sets tokens were drawn
from.

A token's log-prob comes from the pass over the token before it, so that the experts of that token, its *place* in each
layer, are what a trainer replays for it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.kept_sets import KeptChecks
from mismatch_probe.logs.recorded_choices import ABSENT
from mismatch_probe.logs.row import LogFinding
from mismatch_probe.notation import join_names, write_count, write_many, write_number, write_share
from mismatch_probe.records.log_readings import ExpertReading, KeptReading
from mismatch_probe.records.sequences import IntArray, LoggedResponse
from mismatch_probe.stats.sequences import Floats, Ints, Mask

_MOST_EXPERTS: Final = 4096
"""More than any model has in a layer."""
_SHIFTS: Final = (-1, 0, 1)
_FEWEST_PAIRS: Final = 100
_LEAST_GAIN: Final = 0.1
_LEAST_SCORES: Final = 6.0
_MOST_PAIRS: Final = 200_000


@dataclass(frozen=True)
class ExpertLayout:
    """What a checkpoint's configuration says of its experts."""

    num_layers: int
    layers: tuple[int, ...] | None
    """Those that have experts; None where the configuration does not say."""
    num_experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ExpertLayout | None":
        """Of a `config.json`; None of a dense model."""
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        num_layers = config.get("num_hidden_layers")
        names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        num_experts = next((config[name] for name in names if isinstance(config.get(name), int)), 0)
        if not isinstance(num_layers, int) or num_experts < 2:
            return None
        first = config.get("first_k_dense_replace") or 0
        every = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
        dense = config.get("mlp_only_layers") or []
        if not isinstance(first, int) or not isinstance(every, int) or not isinstance(dense, list):
            return cls(num_layers, None, num_experts)
        if "decoder_sparse_step" in config:
            layers = [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0]
        else:
            layers = [layer for layer in range(first, num_layers) if layer not in dense and layer % every == 0]
        return cls(num_layers, tuple(layers), num_experts)


def rows_of_predictors(response: LoggedResponse) -> tuple[Ints, bool]:
    """The rows of `experts` that predict the sampled tokens, -1 where there is none, and whether the rows fit the
    tokens: those of all but the last, of all, or of the response alone.
    """
    assert response.experts is not None
    num_prompt, num_response = response.prompt_token_ids.size, response.token_ids.size
    num_rows, num_tokens = len(response.experts), num_prompt + num_response
    start = 0
    if num_rows not in (num_tokens - 1, num_tokens):
        if num_rows not in (num_response - 1, num_response):
            return np.zeros(0, np.int64), False
        start = num_prompt
    rows = np.flatnonzero(response.sampled) + num_prompt - 1 - start
    return np.where((rows >= 0) & (rows < num_rows), rows, -1), True


@dataclass
class _ExpertSums:
    num_chosen: int = 0
    places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the responses that record experts [L]."""
    recorded_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    invalid: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    repeated_rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    zeros: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    """Places of layers with one expert a token, where that is number 0 [L]."""
    zero_rows: int = 0
    """Tokens for which it is so in all layers."""
    first_zero_row: str = ""
    tokens: int = 0
    without: int = 0
    """Sampled tokens of responses that record nothing, or rows that do not fit."""
    responses: int = 0
    misfits: int = 0
    first_misfit: str = ""
    first_missing: str = ""
    first_invalid: str = ""
    first_repeated: str = ""
    pairs: Floats = field(default_factory=lambda: np.zeros((len(_SHIFTS), 3)))
    """Of two like tokens of a response, by the shift: how many, and sum and squares of the experts' overlap."""


class ChoiceChecks:
    """Add every response, then ask."""

    def __init__(self, layout: ExpertLayout | None = None) -> None:
        self._layout = layout
        self._experts = _ExpertSums()
        self._kept = KeptChecks()

    def add(self, response: LoggedResponse) -> None:
        self._add_experts(response)
        self._kept.add(response)

    def _add_experts(self, response: LoggedResponse) -> None:
        sums, num_sampled = self._experts, int(response.sampled.sum())
        sums.tokens += num_sampled
        if response.experts is None:
            sums.without += num_sampled
            return
        _, num_layers, num_chosen = response.experts.shape
        rows, is_fit = rows_of_predictors(response)
        if not sums.responses:
            sums.num_chosen = num_chosen
            for name in ("places", "recorded_rows", "invalid", "repeated_rows", "zeros"):
                setattr(sums, name, np.zeros(num_layers, np.int64))
        sums.responses += 1
        if not is_fit or (num_layers, num_chosen) != (sums.places.size, sums.num_chosen):
            sums.misfits += 1
            sums.without += num_sampled
            sums.first_misfit = sums.first_misfit or response.where
            return
        expert_choices = np.where((rows >= 0)[:, None, None], response.experts[rows], ABSENT)
        is_recorded = are_recorded(expert_choices)
        largest = self._layout.num_experts if self._layout is not None else _MOST_EXPERTS
        is_invalid = is_recorded & ((expert_choices < 0) | (expert_choices >= largest)).any(axis=2)
        in_order = np.sort(expert_choices, axis=2)
        is_repeated = is_recorded & ~is_invalid & (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
        sums.places += len(rows)
        sums.recorded_rows += is_recorded.sum(axis=0)
        sums.invalid += is_invalid.sum(axis=0)
        sums.repeated_rows += is_repeated.sum(axis=0)
        if num_chosen == 1:
            is_zero = expert_choices[:, :, 0] == 0
            sums.zeros += is_zero.sum(axis=0)
            sums.zero_rows += int(is_zero.all(axis=1).sum())
            if not sums.first_zero_row and is_zero.all(axis=1).any():
                sums.first_zero_row = _place(response, int(is_zero.all(axis=1).argmax()))
        has_layer = is_recorded.any(axis=0)
        for name, is_found in (
            ("first_missing", ~is_recorded & has_layer),
            ("first_invalid", is_invalid),
            ("first_repeated", is_repeated),
        ):
            if not getattr(sums, name) and is_found.any():
                token, layer = (int(places[0]) for places in np.nonzero(is_found))
                setattr(sums, name, f"{_place(response, token)}, layer {layer}")
        if sums.pairs[:, 0].min() < _MOST_PAIRS:
            sums.pairs += _overlaps(response)

    def expert_reading(self) -> ExpertReading | None:
        """None where no response records experts."""
        sums = self._experts
        if not sums.responses:
            return None
        recorded_rows = sums.recorded_rows - self._hidden_zeros()
        empty = np.flatnonzero(recorded_rows == 0)
        layers = np.flatnonzero(recorded_rows > 0) if recorded_rows.any() else np.arange(recorded_rows.size)
        return ExpertReading(
            num_layers=recorded_rows.size,
            num_chosen=sums.num_chosen,
            empty_layers=empty.tolist() if recorded_rows.any() else [],
            num_responses=sums.responses,
            num_misfits=sums.misfits,
            num_places=sums.tokens * layers.size,
            num_recorded=int(recorded_rows[layers].sum()),
            num_invalid=int(sums.invalid[layers].sum()),
            num_repeated=int(sums.repeated_rows[layers].sum()),
            shift=self._token_shift(),
        )

    def _hidden_zeros(self) -> Ints:
        """Places [L] with expert 0 in every layer that stand for no record, as more tokens have that than by chance."""
        sums = self._experts
        num_tokens = int(sums.places[0]) if sums.places.size else 0
        if sums.num_chosen != 1 or not num_tokens:
            return np.zeros_like(sums.recorded_rows)
        live = sums.zeros < num_tokens
        if not live.any():
            return np.full_like(sums.recorded_rows, sums.recorded_rows.max(initial=0))
        shares = (sums.zeros[live] - sums.zero_rows) / max(1, num_tokens - sums.zero_rows)
        expected = num_tokens * float(np.prod(shares))
        is_hidden = live.sum() > 1 and sums.zero_rows > 3 + 5 * expected
        return np.where(live, sums.zero_rows if is_hidden else 0, sums.recorded_rows)

    def _token_shift(self) -> int:
        """By how many tokens the rows stand too late; 0 where they stand right or nothing shows it."""
        counts, sums, squares = self._experts.pairs.T
        if counts.min() < _FEWEST_PAIRS:
            return 0
        means = sums / counts
        errors = np.sqrt(np.maximum(squares / counts - means**2, 0) / counts)
        best = int(means.argmax())
        own = _SHIFTS.index(0)
        gain = float(means[best] - means[own])
        if gain < _LEAST_GAIN or gain < _LEAST_SCORES * float(np.hypot(errors[best], errors[own])):
            return 0
        return -_SHIFTS[best]

    def kept_reading(self) -> KeptReading | None:
        """None where no response records sets."""
        return self._kept.reading()

    def findings(self) -> list[LogFinding]:
        """What is wrong with the recorded choices, and how much of them there is."""
        return [*self._of_experts(), *self._kept.findings()]

    def _of_experts(self) -> Iterator[LogFinding]:
        reading, sums = self.expert_reading(), self._experts
        if reading is None:
            return
        dense = f"; none in {_layers(reading.empty_layers)}" if reading.empty_layers else ""
        yield LogFinding.of(
            LogCode.EXPERTS,
            evidence={"coverage": reading.coverage, "layers": reading.num_layers},
            layers=write_many(reading.num_layers, "layer"),
            chosen=reading.num_chosen,
            share=write_share(reading.num_usable, reading.num_places),
            empty=dense,
        )
        if reading.num_misfits:
            yield LogFinding.of(
                LogCode.EXPERTS_MISFIT,
                evidence={"responses": reading.num_misfits},
                number=write_count(reading.num_misfits),
                total=write_count(reading.num_responses),
                first=sums.first_misfit,
            )
        missing = reading.num_places - reading.num_recorded
        if missing and reading.num_misfits != reading.num_responses:
            yield LogFinding.of(
                LogCode.EXPERTS_MISSING,
                evidence={"places": missing, "of": reading.num_places},
                missing=write_count(missing),
                total=write_count(reading.num_places),
                share=write_share(missing, reading.num_places),
                first="".join(f"; the first: {each}" for each in (sums.first_missing or sums.first_zero_row,) if each),
            )
        for number, variant, first in (
            (reading.num_invalid, "", sums.first_invalid),
            (reading.num_repeated, "repeated", sums.first_repeated),
        ):
            if number:
                yield LogFinding.of(
                    LogCode.EXPERTS_INVALID,
                    variant,
                    evidence={"places": number, "of": reading.num_places},
                    number=write_count(number),
                    share=write_share(number, reading.num_places),
                    first=first,
                )
        if reading.shift:
            yield LogFinding.of(
                LogCode.EXPERTS_SHIFTED,
                evidence={"shift": reading.shift},
                late="late" if reading.shift > 0 else "early",
                own=write_number(_mean_overlap(sums.pairs, 0)),
                best=write_number(_mean_overlap(sums.pairs, -reading.shift)),
            )
        yield from self._of_layers(reading)

    def _of_layers(self, reading: ExpertReading) -> Iterator[LogFinding]:
        """Whether the layers are those that the checkpoint has experts in."""
        layout = self._layout
        if layout is None or layout.layers is None or not reading.num_recorded:
            return
        present = [layer for layer in range(reading.num_layers) if layer not in reading.empty_layers]
        is_compact = reading.num_layers == len(layout.layers) and not reading.empty_layers
        if is_compact or (reading.num_layers == layout.num_layers and tuple(present) == layout.layers):
            return
        yield LogFinding.of(
            LogCode.EXPERTS_SHIFTED,
            "layers",
            evidence={"recorded": present, "layers": list(layout.layers)},
            present=_layers(present),
            layers=_layers(layout.layers),
        )


def _place(response: LoggedResponse, sampled_token: int) -> str:
    place = int(np.flatnonzero(response.sampled)[sampled_token])
    return f"{response.where}, before token {place} of the response"


def are_recorded(experts: IntArray) -> Mask:
    """Which choices [..., K] are recorded: K experts are K numbers, and neither K times 0 nor all absent."""
    is_absent = (experts == ABSENT).all(axis=-1)
    if experts.shape[-1] > 1:
        is_absent |= (experts == 0).all(axis=-1)
    return np.asarray(~is_absent)


def _overlaps(response: LoggedResponse) -> Floats:
    """How alike the experts of the first layer that has some are at two tokens of a response: number, sum and squares
    of the shares [shifts, 3]. The tokens at a shift are the same, the others around are not.
    """
    assert response.experts is not None
    totals = np.zeros((len(_SHIFTS), 3))
    is_recorded = are_recorded(response.experts)
    if not is_recorded.any():
        return totals
    layer = int(is_recorded.any(axis=0).argmax())
    ids = np.concatenate([response.prompt_token_ids, response.token_ids]).astype(np.int64)
    num_rows = len(response.experts)
    start = 0 if num_rows >= ids.size - 1 else response.prompt_token_ids.size
    rows = np.arange(num_rows)[is_recorded[:, layer]]
    tokens = rows + start
    is_inner = (tokens >= 1) & (tokens < ids.size - 1)
    rows, tokens = rows[is_inner], tokens[is_inner]
    experts = response.experts[rows, layer]
    around = np.stack([ids[tokens + shift] for shift in _SHIFTS])
    for number in range(len(_SHIFTS)):
        order = np.argsort(around[number], kind="stable")
        first, second = order[:-1], order[1:]
        is_same = around[:, first] == around[:, second]
        is_pair = is_same[number] & (is_same.sum(axis=0) == 1)
        first, second = first[is_pair], second[is_pair]
        shares = (experts[first][:, :, None] == experts[second][:, None, :]).any(axis=2).mean(axis=1)
        totals[number] += (shares.size, shares.sum(), (shares**2).sum())
    return totals


def _mean_overlap(pairs: npt.NDArray[np.float64], shift: int) -> float:
    count, total, _ = pairs[_SHIFTS.index(shift)]
    return float(total / count)


def _layers(layers: "list[int] | tuple[int, ...]") -> str:
    """`layers 0 to 2`, or each by its number."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {join_names([str(layer) for layer in layers], 8)}" if layers else "no layer"
