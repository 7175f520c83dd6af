"""Guards on metrics that were computed: what they decide of each step, and all that they remember."""

import copy
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from mismatch_probe.errors import BrokenRecord, MismatchProbeError, NameLookup, UsageError, message_of
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.answers import Decision, GuardExplanation, GuardExplanations, inputs_of, off_sentence
from mismatch_probe.guards.book import GuardBook, of_canary
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent, StepFirings, Window
from mismatch_probe.guards.inputs import actions_of, items_of, kind_of_value, step_of
from mismatch_probe.guards.plausible import EntropyBase
from mismatch_probe.guards.probe import ProbedEngines
from mismatch_probe.guards.recovery import GoodSteps, Rate, bearable_rate, restrain_event
from mismatch_probe.guards.rewards import SeenBatches
from mismatch_probe.guards.rules.base import GuardSettings, Values
from mismatch_probe.guards.sums import Metrics

_HISTORY_STEPS: Final = 16
_ALWAYS: Final = frozenset({ActionKind.LOG, ActionKind.WARN})


class StepJudge:
    """Decides, and records why; the loop acts. Everything it remembers is in `state_dict`."""

    off: dict[str, tuple[str, ...]]
    """The guards that are off and the metrics that each lacks, known from the first step on."""

    def __init__(self, settings: Iterable[GuardSettings] | None = None, can: Iterable[str] = ()) -> None:
        """
        Args:
            settings: The guards, as `load_guards` reads them from a guard file; Guards.default() has its own.
            can: The actions that the loop can carry out, by their names or first words: `skip`, `stop`, `rollback`.

        Raises:
            UsageError: There is no such action, two guards share a name, something is no guard, or none is given.
        """
        if settings is None:
            raise UsageError("Guards needs settings: use Guards.default() or Guards.from_file(path)")
        items = items_of(settings)
        if items is None or not all(isinstance(each, GuardSettings) for each in items):
            raise UsageError("settings is no list of guards: use Guards.default() or Guards.from_file(path)")
        if not items:
            raise UsageError("settings holds no guard, so nothing could ever fire: use Guards.default()")
        self._settings, self._can = items, actions_of(can) | _ALWAYS
        self._book = GuardBook(self._settings)
        self._new_guards: tuple[GuardSettings, ...] = ()
        self.off = {}
        self._last_step: int | None = None
        self._probed_engines = ProbedEngines()
        self._batches = SeenBatches()
        self._entropies = EntropyBase()
        self._history: deque[tuple[int, Metrics]] = deque(maxlen=_HISTORY_STEPS)
        self._events: list[GuardEvent] = []
        self._warned_of: frozenset[str] = frozenset()
        self._good = GoodSteps.needed_by(self._settings)
        self._rate = Rate()

    def __repr__(self) -> str:
        """`Guards(48 guards; can skip_update, stop; step 12: 36 on, 12 off)`."""
        num, can = len(self._settings), ", ".join(sorted(self._can - _ALWAYS)) or "warn alone"
        on_or_off = f"{num - len(self.off)} on, {len(self.off)} off"
        course = "no step yet" if self._last_step is None else f"step {self._last_step}: {on_or_off}"
        return f"{type(self).__name__}({num} guards; can {can}; {course})"

    @property
    def doubted_since(self) -> int | None:
        """The first step that a breach rests on which lasts and may end in a rollback; None where there is none."""
        return self._book.doubted_since

    @property
    def last_good_step(self) -> int:
        """The newest step whose checkpoint a rollback may go back to; 0 before the first step."""
        return self._good.last_before(self.doubted_since)

    def went_back(self, step: int) -> None:
        """Say that the loop rolled back. The next rollback goes further back, unless enough clean steps come before it.

        A loop that does not say so is taken to have gone to `Decision.last_good_step`.

        Args:
            step: The step of the checkpoint that it went back to.

        Raises:
            UsageError: It is after the last step that was observed, or below 0.
        """
        number = step_of(step)
        if not 0 <= number <= (self._last_step or 0):
            last = "no step was observed yet" if self._last_step is None else f"the last one was {self._last_step}"
            raise UsageError(f"went_back({number}) names no step before, for {last}: give the step of the checkpoint")
        self._good.went_back(number)

    def explain(self) -> GuardExplanations:
        """Each guard: whether it is on, which input it lacks, and which of its answers this loop cannot give."""
        values = self._history[-1][1] if self._history else {}
        return GuardExplanations(
            tuple(
                GuardExplanation.of(
                    settings,
                    is_on=None if self._last_step is None else settings.name not in self.off,
                    lacking=self.off.get(settings.name, ()),
                    values=values,
                    can=self._can,
                )
                for settings in self._settings
            )
        )

    def judge(self, step: int, metrics: Values, *, canary: bool, withheld: Collection[str] = ()) -> Decision:
        """As `observe`, of metrics that were computed. withheld: those that this step lacks and others may give: one
        side is a copy of the other, or it is open whether entropies are in nats.
        """
        is_first, self._last_step = self._last_step is None, step
        metrics = self._batches.take(metrics) | dict(metrics)
        self._history.append((step, metrics))
        if is_first:
            self._book = GuardBook(self._without_lacking({*metrics, *withheld}, self._settings, has_canary=canary))
            if self.off:
                warnings.warn(off_sentence(len(self.off), len(self._settings)), stacklevel=3)
        elif self._new_guards:
            self._book.join(self._without_lacking({*metrics, *withheld}, self._new_guards, has_canary=canary))
        self._new_guards = ()
        firings = StepFirings(step)
        if canary:
            firings = self._book.observe_canary(of_canary(metrics), step)
        firings = firings.followed_by(self._book.evaluate(step, metrics, withheld))
        window = Window(dict(self._history), self._events)
        firings = self._book.restrain(lambda event: restrain_event(event, window), firings)
        self._tell_of_lacking(step, [name for name in firings.missing if name not in withheld])
        decision = self._decision(firings)
        is_clean = self._is_clean(decision)
        self._good.count(step, is_clean=is_clean, is_judged=not self._book.read_for_rollbacks & set(firings.missing))
        decision = self._with_a_way_back(decision)
        if decision.factor != 1:
            return decision
        return replace(decision, raised=self._rate.raise_after(is_clean=is_clean))

    def judge_update(self, step: int, metrics: Values) -> Decision:
        """As `observe_update`, of metrics that were computed."""
        self.add(metrics)
        decision = self._decision(self._book.evaluate_update(step, metrics))
        if not self._is_clean(decision):
            self._good.doubt()
        return self._with_a_way_back(decision)

    def add(self, metrics: Values) -> None:
        """What became known of the last step after it was judged; diagnoses look at it."""
        self._history[-1][1].update(metrics)

    def diagnosis(self) -> Diagnosis:
        """The likely cause of the last firings."""
        return diagnose(dict(self._history), self._events)

    def state_dict(self) -> dict[str, Any]:
        """Strict JSON; belongs into every checkpoint."""
        return {
            **self._book.state(),
            "off": {name: list(lacking) for name, lacking in self.off.items()},
            "last_step": self._last_step,
            "probed": self._probed_engines.state(),
            "batches": self._batches.state(),
            "entropies": self._entropies.state(),
            "history": [[step, _metrics_as_json(metrics)] for step, metrics in self._history],
            "events": [event.as_json() for event in self._events],
            "good": self._good.state(),
            "rate": self._rate.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what it lacks, guards too, is as at the start: a version before did not have it.

        Args:
            state: What `state_dict` gave.

        Raises:
            UsageError: It is of other guards, or no mapping.
            BrokenRecord: It is no state of guards. Guards are then as they were.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"the state of guards is {kind_of_value(state)}: give what state_dict gave")
        if not {"guards", "evaluated"} <= state.keys():
            raise BrokenRecord("this is no state of guards: give what state_dict gave")
        copy_of_guards = type(self)(self._settings, self._can)
        try:
            copy_of_guards._restore(state)
            copy_of_guards._rehearse()
        except MismatchProbeError:
            raise
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BrokenRecord(
                f"this is no state of guards ({message_of(error)}): give what state_dict gave"
            ) from error
        self.__dict__.update(copy_of_guards.__dict__)
        if names := ", ".join(guard.name for guard in self._new_guards):
            warnings.warn(f"the state of guards knows nothing of {names}: they begin anew", stacklevel=2)

    def _restore(self, state: Mapping[str, Any]) -> None:
        off = {name: tuple(lacking) for name, lacking in state.get("off", {}).items()}
        names = {saved_guard["settings"]["name"] for saved_guard in state["guards"]}
        self._new_guards = tuple(guard for guard in self._settings if guard.name not in {*off, *names})
        book = GuardBook(tuple(guard for guard in self._settings if guard.name in names))
        book.restore(state)
        self._book, self.off = book, off
        last_step = state.get("last_step", 0 if state["evaluated"] else None)
        self._last_step = None if last_step is None else step_of(last_step)
        self._probed_engines = ProbedEngines.of_state(state.get("probed"))
        history = ((step, {name: float(of[name]) for name in of}) for step, of in state.get("history", ()))
        self._history = deque(history, maxlen=_HISTORY_STEPS)
        self._batches = SeenBatches.of_state(state.get("batches"), (values for _, values in self._history))
        self._entropies = EntropyBase.of_state(state.get("entropies", {}))
        self._events = [GuardEvent.from_json(event) for event in state.get("events", ())]
        self._good = GoodSteps.needed_by(self._settings)
        if "good" in state:
            self._good.restore(state["good"])
        if "rate" in state:
            self._rate.restore(state["rate"])

    def _rehearse(self) -> None:
        """A step in a copy, which ends in an error where something of the state is of another kind than it was."""
        metrics = {name: 1.0 for guard in self._settings for name in guard.metrics}
        shared: dict[int, Any] = {id(guard): guard for guard in self._settings}  # which no step changes
        with warnings.catch_warnings(), suppress(MismatchProbeError):
            warnings.simplefilter("ignore")
            copy.deepcopy(self, shared).judge((self._last_step or 0) + 1, metrics, canary=False)

    def _without_lacking(
        self, metrics: Collection[str], guards: Collection[GuardSettings], *, has_canary: bool
    ) -> tuple[GuardSettings, ...]:
        """Those of the guards that this loop can serve; the others are off."""
        lacking = {guard.name: guard.lacks(metrics, has_canary=has_canary) for guard in guards}
        self.off |= {name: lacks for name, lacks in lacking.items() if lacks}
        return tuple(guard for guard in guards if not lacking[guard.name])

    def _tell_of_lacking(self, step: int, missing: Collection[str]) -> None:
        values = self._history[-1][1]
        if values.get("response/length_mean") == 0:
            return
        lacking = inputs_of(missing, values)
        if not self._warned_of.issuperset(lacking):
            self._warned_of |= set(lacking)
            warnings.warn(
                f"step {step} lacks {', '.join(lacking)}: guards that read this judge no step without it, and "
                "this warning comes once",
                stacklevel=4,
            )

    def _is_clean(self, decision: Decision) -> bool:
        return not decision.gives_up and self.doubted_since is None

    def _with_a_way_back(self, decision: Decision) -> Decision:
        decision = replace(decision, last_good_step=self.last_good_step)
        if decision.rollback:
            self.went_back(decision.last_good_step)
        if decision.factor != 1:
            window = Window(dict(self._history), ())
            bearable = bearable_rate(window, decision.last_good_step) if decision.rollback else 1.0
            self._rate.lower(decision.factor, rolls_back=decision.rollback, bearable=bearable)
        return decision

    def _decision(self, firings: StepFirings) -> Decision:
        self._events = [*self._events, *firings.events][-_HISTORY_STEPS * len(self._settings) :]
        return Decision(
            firings=firings,
            metrics=NameLookup(self._history[-1][1]),
            can=self._can,
            diagnosis=self.diagnosis() if firings.events else None,
        )


def _metrics_as_json(metrics: Values) -> dict[str, float | str]:
    return {name: value if value - value == 0 else str(value) for name, value in metrics.items()}
