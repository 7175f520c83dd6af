"""Versions of the weights that the parts of a response were sampled with, as logs hold them; and what lies where they
change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Final

import numpy as np

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.pickles import Unread
from mismatch_probe.logs.row import LogFinding, Row
from mismatch_probe.notation import write_number, write_share
from mismatch_probe.records.log_readings import VersionReading
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.rounding import LevelEdge, change_at_edges
from mismatch_probe.stats.sequences import Mask, Reals, difference, is_usable
from mismatch_probe.verdict.signatures.profile import FIRST_TOKENS, SUREST

Spans = tuple[tuple[str, int], ...]
"""Versions of the parts, in order, and the token that each ends before."""
_OF_SPANS: Final = "spans"
_STARTS: Final = ("start", "abs_start")


def weight_spans(row: Row, column: str, num_tokens: int, *, num_before: int = 0) -> Spans | None:
    """The parts of a response of `num_tokens` tokens; None where the row records none.

    One version for each token; or spans: objects with `version` and `start` (SGLang) or `abs_start`, which counts the
    `num_before` tokens before the response too (miles, under `spans` of each call), or lists that begin with these two
    (vLLM, prime-rl). A part reaches to the start of the next one, whatever a tool wrote in between.

    Raises:
        UsageError: it is something else, or the spans are not in order.
    """
    value = row.columns.get(column)
    if value is None or isinstance(value, Unread) or not num_tokens:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise row.refusal(f"{column} is no list of versions or of spans")
    if len(value) == num_tokens and all(type(each) in (str, int) for each in value):
        starts = [(row.short(column, str(version)), place) for place, version in enumerate(value)]
    else:
        starts = list(_starts(row, column, value, num_before))
    if any(start > next_start for (_, start), (_, next_start) in pairwise(starts)):
        raise row.refusal(f"the spans of {column} are not in the order of the tokens")
    parts: list[tuple[str, int]] = []
    for (version, _), (_, end) in pairwise([*starts, ("", num_tokens)]):
        if end <= (parts[-1][1] if parts else 0):
            continue
        if parts and parts[-1][0] == version:
            parts.pop()
        parts.append((version, min(end, num_tokens)))
    return tuple(parts) or None


def _starts(row: Row, column: str, value: Sequence[Any], num_before: int) -> Iterator[tuple[str, int]]:
    """The version and the first token of each span, in the order of the log."""
    for each in value:
        if isinstance(each, Mapping) and isinstance(each.get(_OF_SPANS), list):
            yield from _starts(row, column, each[_OF_SPANS], num_before)
            continue
        version, start = None, None
        if isinstance(each, Mapping):
            name = next((name for name in _STARTS if name in each), _STARTS[0])
            version, start = each.get("version"), each.get(name)
            if name != _STARTS[0] and type(start) is int:
                start = max(0, start - num_before)
        elif isinstance(each, Sequence) and not isinstance(each, str) and len(each) in (2, 3):
            version, start = each[0], each[1]
        if type(version) not in (str, int) or type(start) is not int or start < 0:
            raise row.refusal(f"{column} is no list of versions or of spans of tokens")
        yield row.short(column, str(version)), start


def version_of(spans: Spans | None, otherwise: str | None = None) -> str | None:
    """The version of all parts, or `FIRST-LAST` of several."""
    if spans is None:
        return otherwise
    first, last = spans[0][0], spans[-1][0]
    return first if len(spans) == 1 else f"{first}-{last}"


def has_several_versions(response: LoggedResponse) -> bool:
    """Whether the log records that the weights changed while the response was sampled."""
    if response.weight_spans is not None:
        return len(response.weight_spans) > 1
    first, dash, last = (response.weight_version or "").partition("-")
    return bool(dash) and first.isdecimal() and last.isdecimal() and first != last


_LEAST_PART: Final = 8
"""Tokens on either side of a change that show the level."""
_NEAR: Final = 64
"""Tokens on either side of a change whose level is compared."""
_MOST_RESPONSES: Final = 2000
"""Drawn at random from all that have a change."""
_ORDERS: Final = ("after the last change as before it", "before the last change as after it")


@dataclass
class VersionChecks:
    """Add every response, then ask: how many have several versions, and how far the level of log(pi / mu) lies apart
    before and after the last recorded change.
    """

    num_responses: int = 0
    num_recorded: int = 0
    num_mixed: int = 0
    first: str = ""
    _squares: list[tuple[float, float]] = field(default_factory=list)
    """Mean squares of d before and after the change, of each response that has both."""
    _edges: list[LevelEdge] = field(default_factory=list)
    _num_edges: int = 0
    _random: Random = field(default_factory=lambda: Random(0))

    def add(self, response: LoggedResponse) -> None:
        self.num_responses += 1
        self.num_recorded += response.weight_version is not None or response.weight_spans is not None
        if not has_several_versions(response):
            return
        self.num_mixed += 1
        self.first = self.first or response.where
        log_pi, log_mu, spans = response.log_pi, response.log_mu, response.weight_spans
        if log_pi is None or log_mu is None or spans is None:
            return
        squares = np.square(difference(log_pi, log_mu))
        is_counted = response.sampled & is_usable(log_pi) & is_usable(log_mu)
        is_before = np.arange(len(squares)) < spans[-2][1]
        before, after = squares[is_counted & is_before], squares[is_counted & ~is_before]
        if before.size and after.size:
            self._squares.append((float(before.mean()), float(after.mean())))
            self._keep(_edge_of(response, log_mu, log_pi, spans, is_counted))

    def _keep(self, edge: LevelEdge | None) -> None:
        """Of all edges so many at random [reservoir sampling, Vitter 1985, ACM TOMS 11]."""
        if edge is None:
            return
        self._num_edges += 1
        if len(self._edges) < _MOST_RESPONSES:
            self._edges.append(edge)
        elif (place := self._random.randrange(self._num_edges)) < _MOST_RESPONSES:
            self._edges[place] = edge

    def reading(self) -> VersionReading | None:
        """None where no response names a version."""
        if not self.num_recorded:
            return None
        before, after = self._rms()
        change = change_at_edges(self._edges)
        return VersionReading(
            num_responses=self.num_responses,
            num_recorded=self.num_recorded,
            num_mixed=self.num_mixed,
            rms_before=before,
            rms_after=after,
            times_before=None if change is None else change.times,
            is_level_changed=change is not None and change.is_clear,
        )

    def _rms(self) -> tuple[float | None, float | None]:
        if not self._squares:
            return None, None
        before, after = np.sqrt(np.mean(self._squares, axis=0)).tolist()
        return before, after

    def findings(self) -> Iterator[LogFinding]:
        reading = self.reading()
        if reading is None or not reading.num_mixed:
            return
        before, after, times = reading.rms_before, reading.rms_after, reading.times_before
        if before is None or after is None:
            variant = "unmeasured"
        else:
            variant = "few" if times is None else "" if reading.is_level_changed else "level"
        yield LogFinding.of(
            LogCode.MIXED_WEIGHTS,
            variant,
            evidence={"responses": reading.num_mixed, "rms_before": before, "rms_after": after},
            number=reading.num_mixed,
            total=reading.num_responses,
            share=write_share(reading.num_mixed, reading.num_responses),
            first=self.first,
            before="" if before is None else write_number(before),
            after="" if after is None else write_number(after),
            times="" if times is None else write_number(max(times, 1 / times)),
            order=_ORDERS[times is not None and times > 1],
        )


def _edge_of(
    response: LoggedResponse, log_mu: Reals, log_pi: Reals, spans: Spans, is_counted: Mask
) -> LevelEdge | None:
    """The tokens near the last change, of the two versions that meet there; None where either has too few."""
    change, start = spans[-2][1], max(FIRST_TOKENS, spans[-3][1] if len(spans) > 2 else 0)
    surprisal = -(log_mu + log_pi) / 2
    near = np.flatnonzero(is_counted & (surprisal > SUREST))
    near = near[(near >= start) & (np.abs(near - change) <= _NEAR)]
    if min((near < change).sum(), (near >= change).sum()) < _LEAST_PART:
        return None
    return LevelEdge(
        np.abs(difference(log_pi, log_mu))[near],
        np.log2(surprisal[near] / SUREST).astype(np.int64),
        near - change,
        len(response.prompt_token_ids) + change,
        response.trajectory or response.group or response.prompt_token_ids.tobytes(),
    )
