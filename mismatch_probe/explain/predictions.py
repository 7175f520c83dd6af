"""What every combination of departures predicts; the declared checkpoint stays loaded, others are read when needed."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

from mismatch_probe.config.explain import ExplainSettings, KnownWeights
from mismatch_probe.explain.distributions import Distribution, TemperatureCurve
from mismatch_probe.explain.passes import LoadedWeights, reference_weights
from mismatch_probe.explain.setup import Context, Rope
from mismatch_probe.explain.tokens import Floats, LoggedTokens


@dataclass(frozen=True)
class Setup:
    """A forward pass: whose weights, which rotary frequencies, which contexts."""

    weights: KnownWeights | None
    rope: Rope | None
    context: Context

    @property
    def key(self) -> tuple[KnownWeights | None, Rope | None, str]:
        return self.weights, self.rope, self.context.name


@dataclass
class Predictions:
    """Log-probs of the log's tokens in FP32 arithmetic, each computed once."""

    settings: ExplainSettings
    tokens: LoggedTokens
    declared: LoadedWeights
    _columns: dict[object, Floats] = field(default_factory=dict)
    _curves: dict[object, TemperatureCurve] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(cls, settings: ExplainSettings, tokens: LoggedTokens) -> Iterator[Self]:
        with reference_weights(settings, tokens) as declared:
            yield cls(settings, tokens, declared)

    def column(self, setup: Setup, distribution: Distribution) -> Floats:
        """[T] in nats; raises as `LoadedWeights.columns`."""
        self.compute(setup, [distribution])
        return self._columns[setup.key, distribution]

    def curve(self, setup: Setup) -> TemperatureCurve:
        """Log-probs by temperature; raises as `LoadedWeights.columns`."""
        if setup.key not in self._curves:
            with self._loaded(setup.weights) as loaded:
                self._curves[setup.key] = loaded.temperature_curve(setup.context, setup.rope)
        return self._curves[setup.key]

    def compute(self, setup: Setup, distributions: Iterable[Distribution]) -> None:
        """All at once, so that `column` has them."""
        missing = [one for one in dict.fromkeys(distributions) if (setup.key, one) not in self._columns]
        if not missing:
            return
        with self._loaded(setup.weights) as loaded:
            found = loaded.columns(setup.context, setup.rope, missing)
        for distribution, column in zip(missing, found, strict=True):
            self._columns[setup.key, distribution] = column

    @contextmanager
    def _loaded(self, weights: KnownWeights | None) -> Iterator[LoadedWeights]:
        if weights is None:
            yield self.declared
            return
        with ExitStack() as stack:
            yield stack.enter_context(
                reference_weights(self.settings, self.tokens, checkpoint=weights.checkpoint, adapter=weights.adapter)
            )
