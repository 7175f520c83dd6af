"""All guards of a run: what the loop asks before each optimizer step, and when a broken rule becomes a firing."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from mismatch_probe.errors import UsageError, did_you_mean
from mismatch_probe.guards.actions import Action, ActionKind
from mismatch_probe.guards.diagnosis import GuardEvent, StepFirings
from mismatch_probe.guards.rules.base import Breach, Firings, GuardSettings, Values


@dataclass
class Escalation:
    """Hysteresis: `patience` broken steps in a row make a firing, `clear_after` clean ones close the incident."""

    patience: int
    clear_after: int
    firings: int = 0
    """How often the guard fired since the incident began."""
    broken_in_a_row: int = 0
    clean_in_a_row: int = 0
    broken_since: int | None = None
    """The first step that the breach rests on which has lasted up to now."""

    def count(self, breach: Breach | None, step: int) -> bool:
        """Takes a step in; whether the guard fires."""
        if breach is None:
            self.broken_in_a_row, self.broken_since = 0, None
            self.clean_in_a_row += 1
            if self.clean_in_a_row >= self.clear_after:
                self.firings = 0
            return False
        self.clean_in_a_row = 0
        self.broken_in_a_row += 1
        if self.broken_since is None:
            self.broken_since = max(1, step + 1 - breach.steps)
        if self.broken_in_a_row < self.patience:
            return False
        self.fire()
        return True

    def fire(self) -> None:
        self.broken_in_a_row = self.clean_in_a_row = 0
        self.firings += 1

    def state(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("patience", "clear_after")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: a count is no whole number.
        """
        counts = {name: count for name, count in state.items() if (name, count) != ("broken_since", None)}
        if any(type(count) is not int for count in counts.values()):
            raise ValueError("a count of a guard's firings is no whole number")
        self.firings = state["firings"]
        self.broken_in_a_row = state["broken_in_a_row"]
        self.clean_in_a_row = state["clean_in_a_row"]
        self.broken_since = state["broken_since"]


CANARY_STEP = 0
_MOST_NAMED: Final = 3
_OF_A_CANARY: Final = ("mismatch/", "sync/")


class GuardBook:
    """Decides and records; the loop executes. Everything it remembers is in `state`, so a resumed run decides alike."""

    def __init__(self, guards: tuple[GuardSettings, ...]) -> None:
        """
        Raises:
            UsageError: two guards share a name.
        """
        names = [guard.name for guard in guards]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise UsageError(f"two guards are named {duplicate!r}; rename one")
        self._guards = tuple(_Guard(settings) for settings in guards)
        self._is_evaluated = False

    @property
    def declared_actions(self) -> frozenset[Action]:
        """Everything the loop may be asked for, so that it can refuse at the start what it cannot do."""
        return frozenset(action for guard in self._guards for firing in guard.settings.actions for action in firing)

    @property
    def read_for_rollbacks(self) -> frozenset[str]:
        """Metrics that guards which may roll back read."""
        rolling = [guard.settings for guard in self._guards if guard.settings.steps_to_roll_back is not None]
        return frozenset(name for settings in rolling for name in settings.metrics)

    @property
    def doubted_since(self) -> int | None:
        """The first step that a breach rests on which lasts and may end in a rollback; None where there is none."""
        return min((guard.doubts_since for guard in self._guards if guard.doubts_since is not None), default=None)

    def check_metrics(self, names: Collection[str], of_canary: Collection[str] | None = None) -> None:
        """`names` are what a step gives, `of_canary` what the canary gives, where that is known.

        Raises:
            UsageError: a guard reads a metric that is not among the `names`, or is held against one that the canary
                lacks, so it could never fire.
        """
        for guard in self._guards:
            guard.check_metrics(names)
            if of_canary is not None:
                guard.check_canary(of_canary)

    def observe_canary(self, metrics: Values, step: int = CANARY_STEP) -> StepFirings:
        """Takes in a canary: pi against mu on weights that were just synced and not updated.

        The first one sets what relative rules compare with. Rules that need no history judge it at once, without
        patience, and later ones are compared with the first's floor as well. A guard is left out where its metrics are
        absent.
        """
        events = [guard.canary(step, metrics) for guard in self._guards]
        return StepFirings(step, tuple(event for event in events if event is not None))

    def evaluate(self, step: int, metrics: Values, withheld: Collection[str] = ()) -> StepFirings:
        """Takes in one step, counted from 1, before its optimizer step. withheld: metrics that this step lacks and
        others give.
        """
        if not self._is_evaluated:
            self.check_metrics({*metrics, *withheld})
            self._is_evaluated = True
        names = dict.fromkeys(name for guard in self._guards for name in guard.settings.metrics)
        events = [guard.step(step, metrics) for guard in self._guards]
        return StepFirings(
            step,
            tuple(event for event in events if event is not None),
            tuple(name for name in names if name not in metrics),
        )

    def evaluate_update(self, step: int, metrics: Values) -> StepFirings:
        """Takes in a later update of a step, before its optimizer step: for guards that read nothing but what it was
        learnt with it is one more step; the others are left out.
        """
        events = [guard.step(step, metrics) for guard in self._guards]
        return StepFirings(step, tuple(event for event in events if event is not None))

    def restrain(self, restraint: Callable[[GuardEvent], GuardEvent], firings: StepFirings) -> StepFirings:
        """The firings, as `restraint` leaves those of guards that need an update to have made a breach. Where one then
        asks for something else, all such guards on its metric start anew: what it fired at is in no doubt, and the
        level from now on.
        """
        guards = [guard for guard in self._guards if guard.settings.needs_update]
        names = {guard.settings.name for guard in guards}
        events = tuple(restraint(event) if event.guard in names else event for event in firings.events)
        changes = {
            event.metric for event_before, event in zip(firings.events, events, strict=True) if event != event_before
        }
        for guard in guards:
            if changes & set(guard.settings.metrics):
                guard.start_anew()
        return replace(firings, events=events)

    def state(self) -> dict[str, Any]:
        """Strict JSON, with the settings it belongs to."""
        return {"evaluated": self._is_evaluated, "guards": [guard.state() for guard in self._guards]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """A guard that the state lacks stays as at the start: it was declared later, or a version before had none.

        Raises:
            UsageError: the state is of other guards.
        """
        saved_guards = {saved_guard["settings"]["name"]: saved_guard for saved_guard in state["guards"]}
        guards = {guard.settings.name: guard for guard in self._guards}
        others = [
            name
            for name, saved_guard in saved_guards.items()
            if name not in guards or not guards[name].is_declared_by(saved_guard["settings"])
        ]
        if others:
            names = ", ".join(map(repr, others[:_MOST_NAMED])) + (", ..." if others[_MOST_NAMED:] else "")
            raise UsageError(
                f"the guards differ from those the run was started with ({names}); resume with the same --guards file, "
                "or start a new run in another --out"
            )
        self._is_evaluated = state["evaluated"]
        for name, saved_guard in saved_guards.items():
            guards[name].restore(saved_guard)

    def join(self, guards: Iterable[GuardSettings]) -> None:
        """More guards, with nothing learnt."""
        self._guards += tuple(_Guard(settings) for settings in guards)


def of_canary(metrics: Values) -> dict[str, float]:
    """What is known of weights just synced, before anything is learnt from them."""
    return {name: value for name, value in metrics.items() if name.startswith(_OF_A_CANARY)}


def _rolls_back(firings: Firings) -> bool:
    return any(action.kind is ActionKind.ROLLBACK for firing in firings for action in firing)


class _Guard:
    """One guard at work: its rule and its escalation."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self._rule = settings.start()
        self._has_fired_at_canary = False
        self._escalation = Escalation(settings.patience, settings.clear_after)

    def check_metrics(self, names: Collection[str]) -> None:
        absent = next((name for name in self.settings.metrics if name not in names), None)
        if absent is not None:
            hint = did_you_mean(absent, names, "; name another metric in the --guards file")
            raise UsageError(
                f"guard {self.settings.name!r} reads {absent!r}, which no step gives, so it could never fire{hint}"
            )

    def check_canary(self, names: Collection[str]) -> None:
        absent = next((name for name in self.settings.canary_metrics if name not in names), None)
        if absent is not None:
            raise UsageError(
                f"guard {self.settings.name!r} is relative to the canary's {absent!r}, which no canary measures; "
                "name a metric of mismatch/ or sync/ in the --guards file, or use another rule"
            )

    @property
    def doubts_since(self) -> int | None:
        """The first step that a lasting breach rests on, where this firing or a later one asks for a rollback, or this
        one stops a run that an earlier one rolled back.
        """
        number = max(0, min(self._escalation.firings, len(self.settings.actions)) - 1)
        earlier_actions, later_actions = self.settings.actions[:number], self.settings.actions[number:]
        stops = any(action.kind is ActionKind.STOP for action in later_actions[0])
        doubts = _rolls_back(later_actions) or (stops and _rolls_back(earlier_actions))
        return self._escalation.broken_since if doubts else None

    def start_anew(self) -> None:
        """With nothing learnt, and no firing behind it."""
        self._rule = self.settings.start()
        self._escalation = Escalation(self.settings.patience, self.settings.clear_after)

    def canary(self, step: int, metrics: Values) -> GuardEvent | None:
        values = self._own_values(metrics)
        self._rule.was_asked = True
        breach = None if values is None else self._rule.judge_canary(values)
        if breach is None or max(step, 1) <= self.settings.warmup:
            return None
        self._escalation.fire()
        self._has_fired_at_canary = True
        return self._event(step, breach)

    def step(self, step: int, metrics: Values) -> GuardEvent | None:
        """A step that lacks a metric counts neither as broken nor as clean; what fired at the canary fired for it."""
        values = self._own_values(metrics)
        if values is None:
            return None
        breach = self._rule.judge(values)
        if self._has_fired_at_canary:
            self._has_fired_at_canary = False
            return None
        if step <= self.settings.warmup or not self._escalation.count(breach, step) or breach is None:
            return None
        return self._event(step, breach)

    def _own_values(self, metrics: Values) -> Values | None:
        """Its own metrics as plain floats; None where one is missing."""
        names = self.settings.metrics
        return {name: float(metrics[name]) for name in names} if all(name in metrics for name in names) else None

    def settings_dict(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json")

    def is_declared_by(self, saved_guard: Mapping[str, Any]) -> bool:
        """Whether these settings are its own, but for the words of `source`; a key that a version before did not know
        has its default.
        """
        words = {"source": self.settings.source}
        try:
            return type(self.settings).model_validate({**saved_guard, **words}) == self.settings
        except ValidationError:
            return False

    def state(self) -> dict[str, Any]:
        return {"settings": self.settings_dict(), "rule": self._rule.state(), "escalation": self._escalation.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rule.restore(state["rule"])
        self._escalation.restore(state["escalation"])

    def _event(self, step: int, breach: Breach) -> GuardEvent:
        firing = self._escalation.firings
        return GuardEvent(
            step=step,
            guard=self.settings.name,
            rule=self.settings.rule,
            metric=breach.metric,
            value=breach.value,
            threshold=breach.threshold,
            firing=firing,
            actions=tuple(
                action.against(breach.metric, breach.value, breach.level) for action in self.settings.asks_for(firing)
            ),
            sentence=breach.sentence,
        )
