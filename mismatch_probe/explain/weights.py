"""Whose weights a side may have had: other versions, an adapter or none, and other rotary frequencies of the same."""

from collections.abc import Iterator, Sequence
from typing import Final

from mismatch_probe.config.explain import ExplainSettings, KnownWeights, LoggedSide
from mismatch_probe.explain.hypotheses import Family, Option, departure
from mismatch_probe.explain.setup import Context, Rope, StaleCache, WeightsPlan
from mismatch_probe.records.logged import LoggedResponse
from mismatch_probe.verdict.codes import Code

_BASE_TIMES: Final = (1 / 100, 1 / 50, 1 / 10, 1 / 4, 1 / 2, 2, 4, 10, 50, 100)
_USUAL_BASES: Final = (1e4, 1e5, 5e5, 1e6, 5e6)
_FACTORS: Final = (0.25, 0.5, 2, 4, 8)
_CACHE_BLOCKS: Final = (1, 16)


def declared_weights(settings: ExplainSettings, responses: Sequence[LoggedResponse], side: LoggedSide) -> WeightsPlan:
    """The given weights whose version the log names for the response, else the checkpoint."""
    known = {other.version: other for other in settings.weights}
    versions = [(response.weight_version, _text(response.step)) for response in responses]
    return WeightsPlan(
        tuple(
            next(
                (
                    known[version]
                    for version in (pair if side == "mu" else pair[::-1])
                    if version is not None and version in known
                ),
                None,
            )
            for pair in versions
        )
    )


def checkpoint_alone(num_responses: int) -> WeightsPlan:
    """The checkpoint that the log is explained with, for every response."""
    return WeightsPlan((None,) * num_responses)


def other_weights(settings: ExplainSettings, declared: WeightsPlan) -> Iterator[Family]:
    """The given weights for all responses, and those of so many versions before the declared ones."""
    in_order = [*settings.weights, None]
    seen = {declared.of_rows}
    options = []
    for other in settings.weights:
        plan = WeightsPlan((other,) * len(declared.of_rows))
        if plan.of_rows not in seen:
            seen.add(plan.of_rows)
            options.append(
                Option(departure("weights", Code.STALE_WEIGHTS, f"the weights of {other.version}"), weights=plan)
            )
    for option in options:
        yield Family(option.departure.what, "weights", (option,))
    for by in range(1, len(settings.weights) + 1):
        older = WeightsPlan(tuple(in_order[max(0, in_order.index(version) - by)] for version in declared.of_rows))
        if older.of_rows not in seen:
            seen.add(older.of_rows)
            what = f"weights {by} version{'s' if by > 1 else ''} older than declared"
            yield Family(
                what, "weights", (Option(departure("weights", Code.STALE_WEIGHTS, what, float(by)), weights=older),)
            )
    if options:
        yield Family("weights of some responses", "weights", tuple(options), chosen_for="response")
    if settings.adapter is not None:
        bare = KnownWeights(version="the checkpoint without its adapter", checkpoint=settings.model.path)
        what = "the checkpoint without its adapter"
        plan = WeightsPlan((bare,) * len(declared.of_rows))
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
