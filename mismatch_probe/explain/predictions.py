"""What every combination of departures predicts; the declared checkpoint stays loaded, and the last other one."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from mismatch_probe.config.explain import ExplainSettings, KnownWeights
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.distributions import Distribution, TemperatureCurve, curve
from mismatch_probe.explain.passes import LoadedWeights, reference_weights, weights_in
from mismatch_probe.explain.setup import Context, PassKey, Setup
from mismatch_probe.explain.tokens import Bools, Floats, LoggedTokens


@dataclass
class Predictions:
    """Log-probs of the log's tokens in FP32 arithmetic, each computed once."""

    settings: ExplainSettings
    tokens: LoggedTokens
    declared: LoadedWeights
    _rounded: dict[tuple[Dtype, str, Distribution], Floats] = field(default_factory=dict)
    _columns: dict[tuple[PassKey, Distribution], Floats] = field(default_factory=dict)
    _curves: dict[PassKey, tuple[Floats, Floats]] = field(default_factory=dict)
    _other: tuple[KnownWeights, LoadedWeights] | None = None
    _closes_other: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def opened(cls, settings: ExplainSettings, tokens: LoggedTokens) -> Iterator[Self]:
        """Raises as `explain`."""
        with reference_weights(settings, tokens) as declared:
            predictions = cls(settings, tokens, declared)
            with predictions._closes_other:
                yield predictions

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
                loaded = self._loaded(key.weights)
                self._fill_cache(loaded, setup)
                self._curves[key] = loaded.temperature_curve(setup.context, setup.rope)
            ours = self._of(setup, key.weights)
            if own is None or normalisers is None:
                own, normalisers = (array.copy() for array in self._curves[key])
            own[ours], normalisers[:, ours] = self._curves[key][0][ours], self._curves[key][1][:, ours]
        assert own is not None
        assert normalisers is not None
        return curve(own, normalisers)

    def rounded(self, dtype: Dtype, context: Context, distribution: Distribution) -> Floats:
        """The declared checkpoint as a training path computes it in a format [T]."""
        key = (dtype, context.name, distribution)
        if key not in self._rounded:
            self._close_other()
            with weights_in(self.settings, self.tokens, dtype) as loaded:
                (self._rounded[key],) = loaded.columns(context, None, [distribution])
        return self._rounded[key]

    def compute(self, setup: Setup, distributions: Iterable[Distribution]) -> None:
        """All at once, so that `column` has them."""
        asked = list(dict.fromkeys(distributions))
        for key in setup.passes():
            missing = [distribution for distribution in asked if (key, distribution) not in self._columns]
            if missing:
                loaded = self._loaded(key.weights)
                self._fill_cache(loaded, setup)
                columns = loaded.columns(setup.context, setup.rope, missing)
                self._columns |= {
                    (key, distribution): column for distribution, column in zip(missing, columns, strict=True)
                }

    def _fill_cache(self, loaded: LoadedWeights, setup: Setup) -> None:
        """Compute the states behind prompts that other weights have computed, where the setup has some."""
        cache = setup.context.cache
        if cache is None or loaded.has_states(setup.context, setup.rope):
            return
        if loaded is self.declared:
            self._close_other()
        if cache.weights is None:
            loaded.compute_behind(self.declared, setup.context, setup.rope)
            return
        with self._opened(cache.weights) as older:
            loaded.compute_behind(older, setup.context, setup.rope)

    def _of(self, setup: Setup, weights: KnownWeights | None) -> Bools:
        """The tokens of responses with these weights [T]."""
        return np.array([row == weights for row in setup.weights.of_rows])[self.tokens.rows]

    @property
    def _format_of_weights(self) -> Dtype | None:
        """What both sides round other weights to; theirs may be exact in no 16 bits, as a trainer's are."""
        dtypes = {self.settings.mu.dtype, self.settings.pi.dtype}
        return next(iter(dtypes)) if len(dtypes) == 1 and all(dtype.is_16_bit for dtype in dtypes) else None

    def _loaded(self, weights: KnownWeights | None) -> LoadedWeights:
        """Of other weights the last ones stay: a search asks them for many things in a row."""
        if weights is None:
            return self.declared
        if self._other is None or self._other[0] != weights:
            self._close_other()
            self._other = weights, self._closes_other.enter_context(self._opened(weights))
        return self._other[1]

    def _close_other(self) -> None:
        self._other = None
        self._closes_other.close()

    def _opened(self, weights: KnownWeights) -> AbstractContextManager[LoadedWeights]:
        return reference_weights(
            self.settings,
            self.tokens,
            checkpoint=weights.checkpoint,
            adapter=weights.adapter,
            rounded_to=self._format_of_weights,
        )
