"""A guard as declared, the rule it starts, and what people call the metric that it watches."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from mismatch_probe.config.model import Count, CountOrNone, Settings
from mismatch_probe.guards.actions import OF_RATE, Action, ActionKind, parse_action
from mismatch_probe.notation import write_count, write_number
from mismatch_probe.stats.catalogue import metric_words as words_of_comparison

_WORDS: Final = {
    "correction/clipped_share": "the share that the correction bounds",
    "correction/rejected_share": "the share that the correction rejects",
    "mismatch/copied_share": "the share of log-probs that one side copied from the other",
    "mismatch/is_ratio_mean": "the mean importance weight of tokens",
    "mismatch/prob_diff_max": "the largest pi - mu",
    "mismatch/prob_diff_min": "the smallest pi - mu",
    "mismatch/surprise_mean": "the mean of log pi plus entropy",
    "mismatch/temperature_fit": "the fitted temperature of pi over that of mu",
    "mismatch/copied_rows_share": "the share of responses whose sides are copies",
    "optim/grad_norm": "the gradient norm",
    "optim/learning_rate": "the learning rate",
    "optim/loss": "the loss",
    "optim/nonfinite_gradients": "the number of gradients that are not finite",
    "optim/overflows_in_a_row": "the number of overflows in a row",
    "policy/entropy": "the entropy of the policy",
    "replay/expert_coverage": "the share of experts that can be replayed",
    "replay/kept_agreement": "the share of recorded sets that hold their token",
    "replay/kept_coverage": "the share of tokens with a recorded set",
    "response/length_mean": "the mean length of responses",
    "response/repeats": "the number of steps before with the same responses",
    "response/returned_after": "the number of steps since the same responses came last",
    "response/steps_not_new": "the number of steps in a row without a new batch",
    "response/truncated_share": "the share of responses that were cut",
    "response/unended_share": "the share of responses without an end token",
    "reward/flat_groups_share": "the share of prompts whose responses earned the same",
    "reward/largest": "the largest reward",
    "reward/mean": "the mean reward",
    "reward/mispaired": "the number of mispaired rewards",
    "reward/nonfinite": "the number of rewards that are not finite",
    "reward/typical": "the usual reward",
    "reward/unrepeated": "the number of rewards that were not repeated",
    "reward/whole_range": "the range of rewards of whole responses",
    "sync/draw_surprise_mean": "the mean of log pi plus entropy of tokens drawn where pi is unsure",
    "sync/engine_unchanged": "the number of engines that a sync left unchanged",
    "sync/probe_k3": "KL (k3) on the probe",
    "sync/probe_logit_error": "the error of a logit on the probe",
    "sync/weights_other": "the number of weights that are not those sent",
    "sync/weights_unchanged": "the number of weights that a sync left unchanged",
    "time/reward_seconds": "the seconds that rewards took",
    "update/policy_shift_farthest": "what the farthest tenth of the tokens makes of the policy's shift",
    "update/policy_shift_k3": "KL (k3) between the policy before and after the update",
}
_OF_COMPARISON: Final = "mismatch/"


def metric_words(name: str) -> str:
    """`the loss` for `optim/loss`; a metric that is somebody's own, or has no words here, by its name."""
    if name in _WORDS:
        return _WORDS[name]
    short = name.removeprefix(_OF_COMPARISON)
    words = words_of_comparison(short) if short != name else name
    return name if words == short.replace("_", " ") else words


Values = Mapping[str, float]
ValueAndError = tuple[float, float | None]
"""A step's value, and its standard error where one is known."""

_LARGEST_COUNT = 1e5


@dataclass(frozen=True)
class Breach:
    """A rule that does not hold at this step, and why in plain words."""

    metric: str
    value: float
    threshold: float
    sentence: str
    steps: int = 1
    """How many steps the value was taken over, this one included."""
    level: float | None = None
    """The level that a rule on a change compares the value with."""


class Guard(ABC):
    """A rule at work: judges one step at a time."""

    remembers: ClassVar[tuple[str, ...]] = ()
    """Its attributes that change, finite JSON each: they are saved with a run and restored."""
    bound: float | None = None
    """The bound that the metric was compared with at the last step, where it moves with the run; else None."""
    was_asked: bool = False
    """Whether it was asked about a canary, be it one that lacked the metrics."""

    @abstractmethod
    def judge(self, values: Values) -> Breach | None:
        """Takes one step in; `values` holds all the guard's metrics."""

    def judge_canary(self, values: Values) -> Breach | None:
        """Takes a canary in: learns from it, or judges it where the rule needs no history. None unless overridden."""
        return None

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.remembers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What a version before did not remember stays as it is at the start."""
        for name in self.remembers:
            setattr(self, name, state.get(name, getattr(self, name)))


def _steps(value: object) -> object:
    """Each firing asks for one action, or for several written as a list."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError('no list of actions; write ["warn", "stop"]')
    return tuple(_firing(firing) for firing in value)


def _firing(firing: object) -> tuple[Action, ...]:
    actions = firing if isinstance(firing, list | tuple) else [firing]
    if not actions:
        raise ValueError('a firing asks for nothing; write "log"')
    return tuple(action if isinstance(action, Action) else parse_action(action) for action in actions)


def _write_firings(firings: tuple[tuple[Action, ...], ...]) -> list[list[str]]:
    return [[str(action) for action in firing] for firing in firings]


Firings = Annotated[tuple[tuple[Action, ...], ...], BeforeValidator(_steps), PlainSerializer(_write_firings)]


class GuardSettings(Settings, ABC):
    """One `[[guard]]` and the rule that it starts; a package brings one in the entry points `mismatch_probe.guards`,
    under the name that `rule` gives.

        class HighSettings(MetricGuardSettings):
            rule: Literal["high"] = "high"
            above: FiniteFloat

            def start(self) -> Guard:
                return High(self)
    """

    name: str = Field(min_length=1)
    rule: str
    patience: Count = 1
    """Broken steps in a row before it fires; it fires again after as many more."""
    clear_after: Count = 10
    """Clean steps in a row after which the next firing is a first one again."""
    warmup: CountOrNone = 0
    """Steps from the start at which it learns but does not judge."""
    actions: Firings
    """What the first, second, ... firing asks for; the last repeats."""
    needs_update: bool = False
    """Whether a breach that no update of the policy can have made (`outside_causes`) is none to roll back for."""
    source: str = ""
    """Of the threshold."""

    @model_validator(mode="after")
    def _has_a_level_to_go_back_to(self) -> "GuardSettings":
        goes_back = any(action.to_level for firing in self.actions for action in firing)
        if goes_back and not (self.rule == "growth" and self.metrics[0].rpartition("/")[2] in OF_RATE):
            raise ValueError(
                "lower_learning_rate(level) needs the rule growth on a learning rate or on update/policy_shift_k3, "
                "whose level before it goes back to; give a factor"
            )
        return self

    @property
    @abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """The metrics it reads, all of which a step must give."""

    @property
    def canary_metrics(self) -> tuple[str, ...]:
        """Those of them that the canary must give."""
        return ()

    def lacks(self, metrics: Collection[str], *, has_canary: bool) -> tuple[str, ...]:
        """What it reads and a run with these metrics never gives."""
        absent = tuple(name for name in self.metrics if name not in metrics)
        return absent or tuple(f"a canary's {name}" for name in self.canary_metrics if not has_canary)

    @property
    def steps_of_a_value(self) -> int:
        """The steps that a value which is judged is taken over, where there is no less."""
        return 1

    @property
    def moving_bound(self) -> Literal["upper", "lower"] | None:
        """Which side a bound is on that moves with the run (`Guard.bound`); None for a rule without one."""
        return None

    @property
    def steps_to_roll_back(self) -> int | None:
        """The steps that it needs, the first broken one included, to ask for a rollback; None where it never does."""
        for firing, actions in enumerate(self.actions, start=1):
            if any(action.kind is ActionKind.ROLLBACK for action in actions):
                return firing * self.patience + self.steps_of_a_value - 1
        return None

    def sees(self, values: Values) -> str:
        """The smallest change that stands out from the noise of such a step; empty where the rule does not know it."""
        return ""

    @abstractmethod
    def start(self) -> Guard:
        """The rule, with nothing learned yet."""

    def asks_for(self, firing: int) -> tuple[Action, ...]:
        """The actions of the `firing`-th firing, from 1."""
        return self.actions[min(firing, len(self.actions)) - 1]


class MetricGuardSettings(GuardSettings):
    """A guard on one metric."""

    metric: str = Field(min_length=1)

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)


def write_value(value: float) -> str:
    """As everywhere; a whole number as a count, and `NaN`, `infinite` for what is no number."""
    if math.isfinite(value):
        is_count = value == round(value) and abs(value) < _LARGEST_COUNT
        return write_count(round(value)) if is_count else write_number(value)
    return "NaN" if math.isnan(value) else "infinite"


def not_a_number(metric: str, value: float, threshold: float) -> Breach | None:
    """No limit is kept by a value that is not finite."""
    if math.isfinite(value):
        return None
    return Breach(metric, value, threshold, f"{metric_words(metric)} is {write_value(value)}, so it keeps no limit")
