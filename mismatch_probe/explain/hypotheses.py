"""What may differ from the declaration: weights, rotary frequencies, context; and the pass that each needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ExplainSettings, KnownWeights, LoggedSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.judging import Bools, Floats, Judge, LoggedTokens
from mismatch_probe.records.findings import Departure, Part
from mismatch_probe.records.sequences import LoggedResponse


@dataclass(frozen=True)
class Rope:
    """Another RoPE base, as a multiple of the checkpoint's, and positions divided by a factor (linear scaling)."""

    base_times: float = 1.0
    positions_divided_by: float = 1.0


@dataclass(frozen=True)
class StaleCache:
    """Keys and values of prompts that other weights computed, in whole blocks of so many tokens."""

    weights: KnownWeights
    block: int

    def num_cached(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are not computed again; its last one always is."""
        return (len(prompt) - 1) // self.block * self.block


@dataclass(frozen=True)
class Context:
    """The prompt of each of R responses, and by how much positions are shifted. `name` identifies it."""

    name: str
    prompts: list[list[int]]
    response_shift: list[int]
    cache: StaleCache | None = None
    """What was kept of the prompts from before."""

    @classmethod
    def as_logged(cls, tokens: LoggedTokens) -> "Context":
        return cls.of("as logged", [sequence.prompt_token_ids for sequence in tokens.sequences])

    @classmethod
    def of(cls, name: str, prompts: list[list[int]]) -> "Context":
        return cls(name, prompts, [0] * len(prompts))


@dataclass(frozen=True)
class WeightsPlan:
    """Which weights each of R responses has; None is the checkpoint that the log is explained with."""

    of_rows: tuple[KnownWeights | None, ...]
    """Of a response whose weights changed, the last ones."""
    parts: tuple[tuple[tuple[KnownWeights | None, int], ...], ...] = ()
    """Of each response: the weights of its parts, and the token that each ends before; empty where none has several."""

    @property
    def different(self) -> list[KnownWeights | None]:
        of_parts = (weights for parts in self.parts for weights, _ in parts)
        return list(dict.fromkeys([*self.of_rows, *of_parts]))

    def parts_of(self, row: int, num_tokens: int) -> tuple[tuple[KnownWeights | None, int], ...]:
        """The parts of a response."""
        return self.parts[row] if self.parts else ((self.of_rows[row], num_tokens),)

    def has(self, weights: KnownWeights | None, tokens: LoggedTokens) -> Bools:
        """Which tokens [T] have these weights."""
        if not self.parts:
            return np.array([row == weights for row in self.of_rows])[tokens.rows]
        return np.concatenate(
            [
                np.repeat(
                    [of_part == weights for of_part, _ in parts],
                    np.diff([end for _, end in parts], prepend=0),
                )
                for parts in self.parts
            ]
        )


@dataclass(frozen=True)
class Setup:
    """A forward pass of every response."""

    weights: WeightsPlan
    rope: Rope | None
    context: Context

    def passes(self) -> list["PassKey"]:
        """The passes of one model each that it takes."""
        return [PassKey(weights, self.rope, self.context.name) for weights in self.weights.different]


@dataclass(frozen=True)
class PassKey:
    weights: KnownWeights | None
    rope: Rope | None
    context: str


Edit = Callable[[Floats, Judge], Floats]
"""From a prediction [T] to what the log's line would hold of it [T], NaN where it holds nothing."""


def departure(part: Part, code: str, what: str, value: float | None = None, declared: str = "") -> Departure:
    return Departure(part=part, code=str(code), what=what, value=value, declared=declared)


@dataclass(frozen=True)
class Option:
    """A departure and what it changes of the computation; what is None stays as declared."""

    departure: Departure
    weights: WeightsPlan | None = None
    rope: Rope | None = None
    context: Context | None = None
    distribution: Distribution | None = None
    edit: Edit | None = None
    dtype: Dtype | None = None


@dataclass(frozen=True)
class Family:
    """Departures of one kind, of which the log chooses: one for all responses, or for each its own or none."""

    name: str
    part: Part
    options: tuple[Option, ...]
    chosen_for: Literal["log", "response"] = "log"
    free_temperature: bool = False
    """Whether the temperature is fitted besides; there is one option then."""
    is_fitted: bool = False
    """Whether its option was fitted to the log already, each half of the tokens as the other half chose."""

    @property
    def num_fitted(self) -> int:
        """Parameters that the log decides."""
        is_chosen = len(self.options) > 1 or self.chosen_for == "response"
        return int(self.free_temperature or self.is_fitted or is_chosen)


_BASE_TIMES: Final = (1 / 100, 1 / 50, 1 / 10, 1 / 4, 1 / 2, 2, 4, 10, 50, 100)
_USUAL_BASES: Final = (1e4, 1e5, 5e5, 1e6, 5e6)
_FACTORS: Final = (0.25, 0.5, 2, 4, 8)
_CACHE_BLOCKS: Final = (1, 16)


def declared_weights(settings: ExplainSettings, responses: Sequence[LoggedResponse], side: LoggedSide) -> WeightsPlan:
    """The given weights whose version the log names for the response, or for each part of it; else the checkpoint. Of a
    record without places, `FIRST-LAST`, the last.
    """
    by_version = {other.version: other for other in settings.weights}

    def first_known(*versions: str | None) -> KnownWeights | None:
        return next((by_version[version] for version in versions if version in by_version), None)

    of_rows = []
    for response in responses:
        ends = recorded_ends(response.weight_version)
        versions = [response.weight_version, *([] if ends is None else [ends[1]]), _text(response.step)]
        of_rows.append(first_known(*(versions if side == "mu" else versions[::-1])))
    if side != "mu" or all(response.weight_spans is None for response in responses):
        return WeightsPlan(tuple(of_rows))
    parts = tuple(
        ((of_row, len(response.token_ids)),)
        if response.weight_spans is None
        else tuple((first_known(version), end) for version, end in response.weight_spans)
        for of_row, response in zip(of_rows, responses, strict=True)
    )
    return WeightsPlan(tuple(each[-1][0] for each in parts), parts)


def recorded_ends(version: str | None) -> tuple[str, str] | None:
    """First and last version of a record without places, `FIRST-LAST`; None of a single version."""
    first, dash, last = (version or "").partition("-")
    return (first, last) if dash and first.isdecimal() and last.isdecimal() else None


def checkpoint_alone(num_responses: int) -> WeightsPlan:
    """The checkpoint that the log is explained with, for every response."""
    return WeightsPlan((None,) * num_responses)


def other_weights(settings: ExplainSettings, declared_plan: WeightsPlan) -> Iterator[Family]:
    """The given weights for all responses, and those of so many versions before the declared ones."""
    in_order = [*settings.weights, None]
    known_rows = {declared_plan.of_rows}
    options = []
    for other in settings.weights:
        plan = WeightsPlan((other,) * len(declared_plan.of_rows))
        if plan.of_rows not in known_rows:
            known_rows.add(plan.of_rows)
            options.append(
                Option(departure("weights", Code.STALE_WEIGHTS, f"the weights of {other.version}"), weights=plan)
            )
    for option in options:
        yield Family(option.departure.what, "weights", (option,))
    for by in range(1, len(settings.weights) + 1):
        older = WeightsPlan(tuple(in_order[max(0, in_order.index(version) - by)] for version in declared_plan.of_rows))
        if older.of_rows not in known_rows:
            known_rows.add(older.of_rows)
            what = f"weights {by} version{'s' if by > 1 else ''} older than declared"
            yield Family(
                what, "weights", (Option(departure("weights", Code.STALE_WEIGHTS, what, float(by)), weights=older),)
            )
    if options:
        yield Family("weights of some responses", "weights", tuple(options), chosen_for="response")
    if settings.adapter is not None:
        bare = KnownWeights(version="the checkpoint without its adapter", checkpoint=settings.model.path)
        what = "the checkpoint without its adapter"
        plan = WeightsPlan((bare,) * len(declared_plan.of_rows))
        yield Family(what, "weights", (Option(departure("weights", Code.STALE_WEIGHTS, what), weights=plan),))


def stale_caches(settings: ExplainSettings, prompts: list[list[int]]) -> Iterator[Family]:
    """The declared weights behind a cache of the prompt that each of the given ones left, whole or in vLLM's blocks."""
    for other in settings.weights:
        what = f"the prompt's key-value cache left by the weights of {other.version}"
        yield Family(
            what,
            "context",
            tuple(
                Option(
                    departure("context", Code.STALE_WEIGHTS, what),
                    context=Context(
                        f"{what} {other.checkpoint or other.adapter} {block}",
                        prompts,
                        [0] * len(prompts),
                        StaleCache(weights=other, block=block),
                    ),
                )
                for block in _CACHE_BLOCKS
            ),
            chosen_for="response",
        )


def other_rope(base: float | None) -> Iterator[Family]:
    """base: the checkpoint's, None where its config does not say."""
    usual = [] if base is None else [usual_base / base for usual_base in _USUAL_BASES if usual_base != base]
    times = sorted({*_BASE_TIMES, *usual})
    yield Family(
        "RoPE base",
        "weights",
        tuple(
            Option(
                departure(
                    "weights", Code.POSITIONS, f"a RoPE base of {times_base:.4g} times the checkpoint's", times_base
                ),
                rope=Rope(base_times=times_base),
            )
            for times_base in times
        ),
    )
    yield Family(
        "RoPE scaling",
        "weights",
        tuple(
            Option(
                departure("weights", Code.POSITIONS, f"RoPE positions divided by {factor:g}", float(factor)),
                rope=Rope(positions_divided_by=factor),
            )
            for factor in _FACTORS
        ),
    )


def _text(step: int | None) -> str | None:
    return None if step is None else str(step)
