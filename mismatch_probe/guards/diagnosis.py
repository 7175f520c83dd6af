"""What the guards say about one step: what fired, what to do, and the diagnosis with what speaks for or against it."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from mismatch_probe.causes import OrderedTests
from mismatch_probe.causes.training import SUMS_IN_ORDER, EndCause
from mismatch_probe.guards.actions import Action, parse_action, strongest_first
from mismatch_probe.guards.rules.base import Values, write_value
from mismatch_probe.notation import write_percent


@dataclass(frozen=True)
class GuardEvent:
    """One firing."""

    step: int
    guard: str
    rule: str
    metric: str
    value: float
    threshold: float
    """In the rule's own unit."""
    firing: int
    """Its number in the incident, from 1."""
    actions: tuple[Action, ...]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """Strict JSON: a value that is not finite is its name, such as `nan`."""
        return {
            "step": self.step,
            "guard": self.guard,
            "rule": self.rule,
            "metric": self.metric,
            "value": self.value if math.isfinite(self.value) else str(self.value),
            "threshold": self.threshold if math.isfinite(self.threshold) else str(self.threshold),
            "firing": self.firing,
            "actions": [str(action) for action in self.actions],
            "sentence": self.sentence,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls(
            **{
                **record,
                "value": float(record["value"]),
                "threshold": float(record["threshold"]),
                "actions": tuple(map(parse_action, record["actions"])),
            }
        )


@dataclass(frozen=True)
class StepFirings:
    """The firings of one step."""

    step: int
    events: tuple[GuardEvent, ...] = ()
    missing: tuple[str, ...] = ()
    """Metrics that guards read and the step lacks; those were not judged."""

    def followed_by(self, other: Self) -> Self:
        """This diagnosis together with a later one of the same step."""
        return replace(self, events=(*self.events, *other.events), missing=(*self.missing, *other.missing))

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the loop is to do: each action once, the strongest first."""
        return strongest_first(action for event in self.events for action in event.actions)


@dataclass(frozen=True)
class Diagnosis:
    cause: EndCause
    sentence: str
    advice: tuple[str, ...]

    @classmethod
    def of(cls, cause: EndCause, variant: str = "", /, **figures: object) -> Self:
        """The catalogue's words for a cause, filled in."""
        return cls(cause, cause.sentence(variant, **figures), tuple(cause.fix(variant, **figures)))

    def __str__(self) -> str:
        return " ".join((self.sentence, *self.advice))


@dataclass(frozen=True)
class Window:
    """The steps looked back on, oldest first, and what fired in them."""

    history: Mapping[int, Values]
    events: Sequence[GuardEvent]

    def series(self, name: str) -> list[float]:
        return [values[name] for values in self.history.values() if name in values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.series(name) if math.isfinite(value)]

    def steps_before(self, step: int) -> "Window":
        """The steps older than that one."""
        return Window({number: values for number, values in self.history.items() if number < step}, ())

    def last(self, name: str) -> float | None:
        """The newest step's value; None where it has none."""
        return self.history[max(self.history)].get(name) if self.history else None


ENDINGS: Final = OrderedTests[Callable[[Window], Diagnosis | None]](SUMS_IN_ORDER)
"""The tests of a window, each for a cause; `diagnose` asks them in order."""

RECENT_STEPS = 4
ALL_COMPARED = 0.99
PROBE_ERROR = "sync/probe_logit_error"
PROBE_JUMP = 3.0
LEAST_PROBE_ERROR = 1e-3
LARGEST_ROUNDING_NATS = 0.1
"""Of a logit in BF16, whose last digit is 1/256 of it; 0.02 to 0.07 were measured on the demo checkpoint."""
SHIFT_RESTORES = 0.3
SCALE_EXPLAINS = 0.5
SCALE_EXPLAINS_PART = 0.3
"""The logit scale is guessed from the log-probs, and of heavy-tailed logits explains 0.35 to 0.59 of what a temperature
makes; of other weights whose fit is as steady 0.09 to 0.12."""
LARGEST_SLOPE = 1.0
SLOPES_AGREE = 1.6
LEAST_SLOPE = 0.05
FAR_MAKES_IT = 0.9
FOLLOWS = 0.1
APART_NATS = 1.0
HIDDEN_SHARE = 0.25


def weights_are_equal(window: Window) -> bool:
    """Whether digests of the last steps say that the engine held all that it was sent; False where nothing says so."""
    recent = [window.history[step] for step in sorted(window.history)[-RECENT_STEPS:]]
    return bool(recent) and all(
        step.get("sync/weights_compared", 0.0) >= ALL_COMPARED
        and not step.get("sync/weights_other", 0.0)
        and not step.get("sync/weights_unchanged", 0.0)
        for step in recent
    )


def probe_agrees(window: Window) -> bool:
    """Whether both sides score the probe of the last step as rounding lets them; False where there is none."""
    probes = window.finite(PROBE_ERROR)
    if not probes or window.last(PROBE_ERROR) != probes[-1]:
        return False
    usual = statistics.median(probes)
    return probes[-1] <= min(LARGEST_ROUNDING_NATS, max(LEAST_PROBE_ERROR, PROBE_JUMP * usual)) and _last_probe_k3(
        window
    )


def _last_probe_k3(window: Window) -> bool:
    k3, responses = window.last("sync/probe_k3"), window.last("mismatch/kl_k3")
    return k3 is not None and responses is not None and k3 <= FOLLOWS * responses


def engine_follows(window: Window, shift: float) -> bool:
    """Whether the engine went where an update took pi: after the sync it is nearer to pi than a tenth of the `shift`
    [nats] at the step that moved as far, and was not a nat from it before; True where no probe says otherwise.
    """
    steps = sorted(window.history)
    places = [place for place, step in enumerate(steps) if window.history[step].get("update/policy_shift_k3") == shift]
    if not places:
        return True
    distance, distance_before = (
        window.history[steps[place]].get("sync/probe_k3", math.nan) for place in (places[-1], places[-1] - 1)
    )
    return not (distance > FOLLOWS * shift or (places[-1] > 0 and distance_before > min(APART_NATS, FOLLOWS * shift)))


def logit_slopes(window: Window) -> list[float]:
    """Of the two of the last three steps in which the logit scale explains most of d, where it does explain it and both
    tell the same slope; else none.
    """
    slopes, shares = (window.series(f"mismatch/scale_{name}")[-3:] for name in ("slope", "share"))
    best = sorted(zip(shares, slopes, strict=False), key=lambda step: -step[0])[:2]
    if len(best) < 2 or not best[1][0] >= SCALE_EXPLAINS or best[0][1] * best[1][1] <= 0:
        return []
    small, large = sorted(abs(slope) for _, slope in best)
    if not LEAST_SLOPE <= small <= large <= LARGEST_SLOPE or large > SLOPES_AGREE * small:
        return []
    return [slope for _, slope in best]


def contradicts_temperature(window: Window, explains: float) -> bool:
    """Whether in both of the last steps the logit scale explains less than that share of d, or in one it asks for a
    ratio that no temperature has.
    """
    slopes, shares = (window.series(f"mismatch/scale_{name}")[-2:] for name in ("slope", "share"))
    return bool(shares) and (max(shares) < explains or max(map(abs, slopes)) > LARGEST_SLOPE)


def is_hidden(window: Window, surprise: float) -> bool:
    """Whether the log-probs of both sides agree where tokens surprise pi by as much on average [nats]."""
    gaps = window.finite("mismatch/kl_k1")[-2:]
    return not gaps or abs(statistics.fmean(gaps)) <= HIDDEN_SHARE * abs(surprise)


def ruled_out(window: Window) -> Iterator[str]:
    """Causes of a mismatch that the last step's numbers speak against, each with its number."""
    rest, share, slope = (window.last(f"mismatch/{name}") for name in ("shift_left", "scale_share", "scale_slope"))
    if rest is not None and rest > SHIFT_RESTORES:
        yield f"log-probs shifted by one token (a shift leaves {write_value(rest)} times the difference)"
    if share is not None and slope is not None and not logit_slopes(window):
        yield f"a temperature (the logit scale explains {write_percent(share)} at a slope of {write_value(slope)})"
    error = window.last("mismatch/logit_error")
    if error is not None and error > LARGEST_ROUNDING_NATS:
        yield (
            f"rounding (logits differ by {write_value(error)} nats on average, in BF16 by up to "
            f"{write_value(LARGEST_ROUNDING_NATS)})"
        )
    if weights_are_equal(window):
        yield "other weights in the engine (no digest differs from what was sent)"
    means = window.series("mismatch/logprob_mu")[-2:]
    if len(means) == 2 and means[0] != means[1]:
        yield f"a repeated batch (mu's mean log-prob went from {write_value(means[0])} to {write_value(means[1])})"
    shift = max(window.finite("update/policy_shift_k3"), default=0.0)
    if shift and not engine_follows(window, shift):
        yield f"too large an update (the engine did not follow where pi moved by {write_value(shift)} nats)"
