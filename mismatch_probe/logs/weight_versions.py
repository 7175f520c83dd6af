"""Versions of the weights that the parts of a response were sampled with, as logs hold them; and what lies where they
change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from mismatch_probe.causes.findings import LogCode
from mismatch_probe.logs.pickles import Unread
from mismatch_probe.logs.row import LogFinding, Row
from mismatch_probe.notation import write_number, write_share
from mismatch_probe.records.log_readings import VersionReading
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.stats.rounding import LeastSquares
from mismatch_probe.stats.sequences import Ints, Mask, Reals, is_usable
from mismatch_probe.verdict.signatures.profile import sizes_by_sureness

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


_LEAST_RESPONSES: Final = 8
_MOST_RESPONSES: Final = 2000
_LEAST_FOLD: Final = 1.5
_CLEAR_ERRORS: Final = 4.0
_NEAR: Final = 128
"""Tokens on either side of a change whose level is compared: growth along a response is small among them."""
_LEAST_FRACTION: Final = 0.1
"""Of the level at tokens as sure: log-probs that happen to be nearly equal count as no nearer."""


class _Edge(NamedTuple):
    """Tokens [T] on either side of the last change of a response."""

    log_mu: Reals
    log_pi: Reals
    places: Ints
    is_before: Mask


@dataclass
class VersionChecks:
    """Add every response, then ask: how many have several versions, and how far the level of log(pi / mu) lies apart
    before and after the last recorded change.
    """

    num_responses: int = 0
    num_recorded: int = 0
    num_mixed: int = 0
    first: str = ""
    _levels: list[tuple[float, float]] = field(default_factory=list)
    """Mean squares of d before and after the change, of each response that has both."""
    _edges: list[_Edge] = field(default_factory=list)
    """Of the first so many responses."""

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
        squares = np.square(log_pi - log_mu)
        is_counted = response.sampled & is_usable(log_pi) & is_usable(log_mu)
        is_before = np.arange(len(squares)) < spans[-2][1]
        before, after = squares[is_counted & is_before], squares[is_counted & ~is_before]
        if not before.size or not after.size:
            return
        self._levels.append((float(before.mean()), float(after.mean())))
        if len(self._edges) < _MOST_RESPONSES:
            number = before.size
            near = np.flatnonzero(is_counted)[max(0, number - _NEAR) : number + _NEAR]
            self._edges.append(_Edge(log_mu[near], log_pi[near], near, is_before[near]))

    def reading(self) -> VersionReading | None:
        """None where no response names a version."""
        if not self.num_recorded:
            return None
        before, after = self._rms()
        times, is_changed = self._times_before()
        return VersionReading(
            num_responses=self.num_responses,
            num_recorded=self.num_recorded,
            num_mixed=self.num_mixed,
            rms_before=before,
            rms_after=after,
            times_before=times,
            is_level_changed=is_changed,
        )

    def _rms(self) -> tuple[float | None, float | None]:
        if not self._levels:
            return None, None
        before, after = np.sqrt(np.mean(self._levels, axis=0)).tolist()
        return before, after

    def _times_before(self) -> tuple[float | None, bool]:
        """The level of d before the change over that after it, at tokens as sure, and whether it is changed beyond
        doubt; None of few responses.

        Log levels are fitted by least squares with the change and with growth, each response with a level of its own: a
        line in the place and one in its logarithm. The error is a jackknife's over the responses.
        """
        from scipy.stats import norm, t

        if len(self._edges) < _LEAST_RESPONSES:
            return None, False
        log_mu, log_pi, places, is_before = map(np.concatenate, zip(*self._edges, strict=True))
        rows = np.repeat(np.arange(len(self._edges)), [len(edge.places) for edge in self._edges])
        is_moved, sizes, usual = sizes_by_sureness(log_mu, log_pi)
        levels = np.maximum(sizes - usual, np.log(_LEAST_FRACTION))
        columns = np.column_stack([is_before, places, np.log1p(places), levels])[is_moved]
        rows = np.unique(rows[is_moved], return_inverse=True)[1]
        if rows.max(initial=-1) + 1 < _LEAST_RESPONSES:
            return None, False
        counts = np.bincount(rows)
        centred = columns - np.column_stack([np.bincount(rows, column) / counts for column in columns.T])[rows]
        fit = LeastSquares(centred[:, :-1], centred[:, -1])
        error, freedom = fit.first_error(rows)
        rise = float(fit.coefficients[0])
        is_clear = error > 0 and t.sf(abs(rise) / error, freedom) < norm.sf(_CLEAR_ERRORS)
        return float(np.exp(rise)), is_clear and abs(rise) >= np.log(_LEAST_FOLD)

    def findings(self) -> Iterator[LogFinding]:
        reading = self.reading()
        if reading is None or not reading.num_mixed:
            return
        evidence = {"responses": reading.num_mixed, "rms_before": reading.rms_before, "rms_after": reading.rms_after}
        share = write_share(reading.num_mixed, reading.num_responses)
        before, after = reading.rms_before, reading.rms_after
        times = reading.times_before
        variant = "unmeasured" if before is None or after is None else "" if reading.is_level_changed else "level"
        yield LogFinding.of(
            LogCode.MIXED_WEIGHTS,
            variant,
            evidence=evidence,
            number=reading.num_mixed,
            total=reading.num_responses,
            share=share,
            first=self.first,
            before="" if before is None else write_number(before),
            after="" if after is None else write_number(after),
            times="" if times is None else write_number(times),
        )
