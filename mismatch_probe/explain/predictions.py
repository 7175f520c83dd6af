"""What every combination of departures predicts, and in which format a side rounds.

A format is no prediction but a size: its error on every token of like probability. So a format is a departure where
what is left of the residual is rounding of that format: of its size on likely and on unlikely tokens, early and late,
in almost every response, and to both sides alike. Other weights can look like all of that. But they do not err where
and whither the format errs on these very tokens, while an engine does, since most of what it rounds is the same.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from mismatch_probe.causes.comparison import Code
from mismatch_probe.config.model import ExplainSettings, KnownWeights
from mismatch_probe.dtypes import COMPUTED_IN, Dtype
from mismatch_probe.explain.fitting import Distribution, TemperatureCurve, curve
from mismatch_probe.explain.hypotheses import Context, Family, Option, PassKey, Setup, departure
from mismatch_probe.explain.judging import Account, Bools, Floats, Judge, LoggedTokens
from mismatch_probe.explain.passes import LoadedWeights, reference_weights, weights_in
from mismatch_probe.stats.rounding import Floor
from mismatch_probe.stats.sequences import Ints


@dataclass
class Predictions:
    """Log-probs of the log's tokens in FP32 arithmetic, each computed once."""

    settings: ExplainSettings
    tokens: LoggedTokens
    declared_model: LoadedWeights
    clock: "PassClock" = field(default_factory=lambda: PassClock())
    _in_formats: dict[tuple[Dtype, str, Distribution], Floats] = field(default_factory=dict)
    _columns: dict[tuple[PassKey, Distribution], Floats] = field(default_factory=dict)
    _curves: dict[PassKey, tuple[Floats, Floats]] = field(default_factory=dict)
    _other: tuple[KnownWeights, LoadedWeights] | None = None
    _closes_other: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def open(cls, settings: ExplainSettings, tokens: LoggedTokens) -> Iterator[Self]:
        """Raises as `explain`."""
        with reference_weights(settings, tokens) as model:
            predictions = cls(settings, tokens, model)
            with predictions._closes_other:
                yield predictions

    def tokens_to_pass(self, hypotheses: Sequence[Sequence[Setup]]) -> list[int]:
        """The tokens that each hypothesis sends through a model for the first time; of one that was computed, none."""
        earlier = {key for key, _ in self._columns} | self._curves.keys()
        counts = []
        for setups in hypotheses:
            new = {key: setup.context for setup in setups for key in setup.passes() if key not in earlier}
            earlier |= new.keys()
            counts.append(sum(self._num_tokens(context) for context in new.values()))
        return counts

    def _num_tokens(self, context: Context) -> int:
        return sum(map(len, context.prompts)) + int(self.tokens.lengths.sum())

    def column(self, setup: Setup, distribution: Distribution) -> Floats:
        """[T] in nats; raises as `LoadedWeights.columns`."""
        self.compute(setup, [distribution])
        values = np.full(len(self.tokens.rows), np.nan)
        for key in setup.passes():
            ours = self._of(setup, key.weights)
            values[ours] = self._columns[key, distribution][ours]
        return values

    def curve(self, setup: Setup) -> TemperatureCurve:
        """Log-probs by temperature; raises as `LoadedWeights.columns`."""
        own, normalisers = None, None
        for key in setup.passes():
            if key not in self._curves:
                weights_in_use = self._load(key.weights)
                self._fill_cache(weights_in_use, setup)
                self._curves[key] = weights_in_use.temperature_curve(setup.context, setup.rope)
            ours = self._of(setup, key.weights)
            if own is None or normalisers is None:
                own, normalisers = (array.copy() for array in self._curves[key])
            own[ours], normalisers[:, ours] = self._curves[key][0][ours], self._curves[key][1][:, ours]
        assert own is not None
        assert normalisers is not None
        return curve(own, normalisers)

    def in_format(self, dtype: Dtype, context: Context, distribution: Distribution) -> Floats:
        """The declared checkpoint as a training path computes it in a format [T]."""
        key = (dtype, context.name, distribution)
        if key not in self._in_formats:
            self._close_other()
            with weights_in(self.settings, self.tokens, dtype) as weights_in_use:
                (self._in_formats[key],) = weights_in_use.columns(context, None, [distribution])
        return self._in_formats[key]

    def compute(self, setup: Setup, distributions: Iterable[Distribution]) -> None:
        """All at once, so that `column` has them."""
        unique = list(dict.fromkeys(distributions))
        for key in setup.passes():
            missing = [distribution for distribution in unique if (key, distribution) not in self._columns]
            if missing:
                weights_in_use = self._load(key.weights)
                self._fill_cache(weights_in_use, setup)
                columns = weights_in_use.columns(setup.context, setup.rope, missing)
                self._columns |= {
                    (key, distribution): column for distribution, column in zip(missing, columns, strict=True)
                }

    def column_with_kept_cache(
        self,
        older: KnownWeights | None,
        newer: KnownWeights | None,
        context: Context,
        ends: Mapping[int, int],
        distribution: Distribution,
    ) -> Floats:
        """What the newer weights give from the token `ends[ROW]` of a response on, behind keys and values that the
        older ones computed; [T] in nats, NaN at the other tokens.
        """
        with ExitStack() as stack:
            if older is not None and newer is not None:
                self._close_other()
                models = [stack.enter_context(self._open(each)) for each in (older, newer)]
            else:
                models = [self._load(each) for each in (older, newer)]
            return models[1].column_with_kept_cache(models[0], context, ends, distribution)

    def _fill_cache(self, weights_in_use: LoadedWeights, setup: Setup) -> None:
        """Compute the states behind prompts that other weights have computed, where the setup has some."""
        cache = setup.context.cache
        if cache is None or weights_in_use.has_states(setup.context, setup.rope):
            return
        if cache.weights is None or weights_in_use is self.declared_model:
            weights_in_use.compute_behind(self._load(cache.weights), setup.context, setup.rope)
            return
        with self._open(cache.weights) as older:
            weights_in_use.compute_behind(older, setup.context, setup.rope)

    def _of(self, setup: Setup, weights: KnownWeights | None) -> Bools:
        """The tokens with these weights [T]."""
        return setup.weights.has(weights, self.tokens)

    @property
    def _format_of_weights(self) -> Dtype | None:
        """What both sides round other weights to; theirs may be exact in no 16 bits, as a trainer's are."""
        dtypes = {self.settings.mu.dtype, self.settings.pi.dtype}
        return next(iter(dtypes)) if len(dtypes) == 1 and all(dtype.rounds_coarsely for dtype in dtypes) else None

    def _load(self, weights: KnownWeights | None) -> LoadedWeights:
        """Of other weights the last ones stay: a search asks them for many things in a row."""
        if weights is None:
            return self.declared_model
        if self._other is None or self._other[0] != weights:
            self._close_other()
            self._other = weights, self._closes_other.enter_context(self._open(weights))
        return self._other[1]

    def _close_other(self) -> None:
        self._other = None
        self._closes_other.close()

    def _open(self, weights: KnownWeights) -> AbstractContextManager[LoadedWeights]:
        return reference_weights(
            self.settings,
            self.tokens,
            checkpoint=weights.checkpoint,
            adapter=weights.adapter,
            rounded_to=self._format_of_weights,
        )


@dataclass
class PassClock:
    """How long the tokens take that are yet to be sent through a model, by those that were."""

    _tokens: int = 0
    _seconds: float = 0.0

    @contextmanager
    def measure(self, num_tokens: int) -> Iterator[None]:
        """Around the passes of so many tokens; where there are none, nothing is learnt."""
        since = time.monotonic()
        yield
        if num_tokens:
            self._tokens += num_tokens
            self._seconds += time.monotonic() - since

    def seconds(self, num_tokens: int) -> float | None:
        """That so many tokens take; None while none were measured."""
        return self._seconds / self._tokens * num_tokens if self._tokens else None


LEAST_TIMES: Final = 0.4
MOST_TIMES: Final = 2.5
"""Of the measured floor, in every part of the tokens."""
_LEAST_TIMES_CORRELATED: Final = 0.15
"""Where the errors go together too; of a model that is sure of its tokens a few make up most of the error."""
_MOST_BIAS: Final = 0.3
_MOST_OTHERWISE: Final = 0.1
_OUTLIER: Final = 3.0
_LEAST_CORRELATION: Final = 0.1
"""An engine's errors and the training path's have 0.5 and more in common in BF16, 0.1 and more in FP16."""
_STANDARD_ERRORS: Final = 4.0
_PARTS: Final = 4
_LEAST_TOKENS: Final = 30


def other_formats(declared_dtype: Dtype) -> Iterator[Family]:
    for dtype in COMPUTED_IN:
        if dtype != declared_dtype:
            what = f"{dtype.upper()} arithmetic instead of {declared_dtype.upper()}"
            yield Family(what, "format", (Option(departure("format", Code.ONE_SIDED_DTYPE, what), dtype=dtype),))


def coarser_formats(declared_dtype: Dtype) -> list[Dtype]:
    return [dtype for dtype in COMPUTED_IN if dtype.round_off > declared_dtype.round_off]


def floors_of_formats(floors: dict[Dtype, Floor]) -> dict[Dtype, Floor]:
    """Of every format; of one that was not measured, from the coarsest that was by the spacing of its numbers."""
    coarsest = max(floors, key=lambda dtype: dtype.round_off)
    own = floors[coarsest]
    return {dtype: floors.get(dtype) or own.of_format(dtype.round_off / coarsest.round_off) for dtype in COMPUTED_IN}


def is_rounding(judge: Judge, account: Account, tokens: LoggedTokens, dtype: Dtype, errors: Floats | None) -> bool:
    """Whether the residual is rounding of the account's unit, wherever it is looked at.

    Of FP32 it may be less, since its floor is a bound for every machine. errors: the format's own on the training path
    [T], nats; None where a finer format than the declared one is asked about, which nothing else looks like.
    """
    units = judge.residual(account) / account.unit
    is_known = np.isfinite(units)
    if is_known.sum() < _LEAST_TOKENS or abs(np.median(units[is_known])) > _MOST_BIAS:
        return False
    if errors is not None and not _goes_with(units[is_known], (errors / account.unit)[is_known]):
        return False
    by_likelihood = _parts(account.prediction, is_known)
    by_place = _parts(tokens.places.astype(np.float64), is_known)
    sizes = [*_sizes(units, by_likelihood, is_known), *_sizes(units, by_place, is_known)]
    by_row = np.array(_sizes(units, tokens.rows, is_known))
    least = 0.0 if not dtype.rounds_coarsely else LEAST_TIMES if errors is None else _LEAST_TIMES_CORRELATED
    otherwise = np.mean((by_row < least / 2) | (by_row > MOST_TIMES * 2)) if len(by_row) else 0.0
    return all(least <= size <= MOST_TIMES for size in sizes) and bool(otherwise <= _MOST_OTHERWISE)


def _goes_with(units: Floats, errors: Floats) -> bool:
    """Whether residuals and errors are correlated, their outliers cut."""
    ours, theirs = (np.clip(np.nan_to_num(values), -_OUTLIER, _OUTLIER) for values in (units, errors))
    spread = float(ours.std() * theirs.std())
    correlation = float(np.mean((ours - ours.mean()) * (theirs - theirs.mean()))) / spread if spread > 0 else 0.0
    return bool(correlation >= max(_LEAST_CORRELATION, _STANDARD_ERRORS / np.sqrt(len(units))))


def _parts(values: Floats, is_known: Bools) -> Ints:
    edges = np.quantile(values[is_known], np.linspace(0, 1, _PARTS + 1)[1:-1])
    return np.asarray(np.searchsorted(edges, np.nan_to_num(values)))


def _sizes(units: Floats, parts: Ints, is_known: Bools) -> list[float]:
    """Root mean square of each part that has enough tokens, without its largest hundredth."""
    sizes = []
    for part in np.unique(parts[is_known]):
        ours = units[is_known & (parts == part)] ** 2
        if len(ours) >= _LEAST_TOKENS:
            sizes.append(float(np.sqrt(np.sort(ours)[: round(len(ours) * 0.99)].mean())))
    return sizes
