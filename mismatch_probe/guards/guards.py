"""The guards of a training loop, whoever's loop it is: give them what a step gave, and do what they decide.

docs/api.md shows them at work, on one rank and on several.
"""

import copy
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from mismatch_probe.errors import BrokenRecord, MismatchProbeError, NameLookup, UsageError, message_of
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.answers import Decision, GuardExplanation, GuardExplanations, warn_of_lacking
from mismatch_probe.guards.batch import Batch
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent, StepFirings, Window
from mismatch_probe.guards.inputs import (
    actions_of,
    flag_of,
    items_of,
    kind_of_value,
    learnt_of,
    next_step,
    probes_of,
    step_of,
    strict_json,
    sums_of,
)
from mismatch_probe.guards.load import DEFAULT_GUARDS, load_guards
from mismatch_probe.guards.plausible import EntropyBase, tell_of_base, tell_of_left_out
from mismatch_probe.guards.probe import Probe, ProbedEngines
from mismatch_probe.guards.recovery import GoodSteps, Rate, restrained
from mismatch_probe.guards.rewards import SeenBatches
from mismatch_probe.guards.rules.base import GuardSettings, Values
from mismatch_probe.guards.self_test import SelfTest, run_self_test, silent_judge
from mismatch_probe.guards.sums import Metrics, Sums
from mismatch_probe.reading import Unreadable, as_path

_HISTORY_STEPS: Final = 16
_OF_A_CANARY: Final = ("mismatch/", "sync/")
_ALWAYS: Final = frozenset({ActionKind.LOG, ActionKind.WARN})


class Guards:
    """Decides, and records why; the loop acts. Everything it remembers is in `state_dict`."""

    def __init__(self, settings: Iterable[GuardSettings], can: Iterable[str] = ()) -> None:
        """
        Args:
            settings: The guards, as `load_guards` reads them from a guard file.
            can: The actions that the loop can carry out, by their names or first words: `skip`, `stop`, `rollback`.

        Raises:
            UsageError: There is no such action, two guards share a name, something is no guard, or none is given.
        """
        items = items_of(settings)
        if items is None or not all(isinstance(each, GuardSettings) for each in items):
            raise UsageError("settings is no list of guards: use Guards.default() or Guards.from_file(path)")
        if not items:
            raise UsageError("settings holds no guard, so nothing could ever fire: use Guards.default()")
        self._settings, self._can = items, actions_of(can) | _ALWAYS
        self._book = GuardBook(self._settings)
        self._later: tuple[GuardSettings, ...] = ()
        self.off: dict[str, tuple[str, ...]] = {}
        """The guards that are off and the metrics that each lacks, known from the first step on."""
        self._last_step: int | None = None
        self._probed = ProbedEngines()
        self._seen = SeenBatches()
        self._entropies = EntropyBase()
        self._history: deque[tuple[int, Metrics]] = deque(maxlen=_HISTORY_STEPS)
        self._events: list[GuardEvent] = []
        self._warned_of: frozenset[str] = frozenset()
        self._good = GoodSteps.under(self._settings)
        self._rate = Rate()

    @classmethod
    def default(cls, can: Iterable[str] = ()) -> Self:
        """The default guards of docs/guards.md.

        Args:
            can: The actions that the loop can carry out, as for the constructor.

        Raises:
            UsageError: There is no such action.
        """
        return cls(DEFAULT_GUARDS, can)

    @classmethod
    def from_file(cls, path: str | Path, can: Iterable[str] = ()) -> Self:
        """The guards that a guard file asks for.

        Args:
            path: The guard file, TOML or YAML.
            can: The actions that the loop can carry out, as for the constructor.

        Raises:
            UsageError: The file cannot be read, or something in it cannot be used.
        """
        try:
            return cls(load_guards(as_path(path)), can)
        except Unreadable as error:
            raise UsageError(f"no guard file can be read: {error}") from error

    def __repr__(self) -> str:
        """`Guards(53 guards; can skip_update, stop; step 12: 41 on, 12 off)`."""
        num, can = len(self._settings), ", ".join(sorted(self._can - _ALWAYS)) or "warn alone"
        course = "no step yet"
        if self._last_step is not None:
            course = f"step {self._last_step}: {num - len(self.off)} on, {len(self.off)} off"
        return f"Guards({num} guards; can {can}; {course})"

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

    def observe(
        self,
        batch: Batch | Sums | None = None,
        *,
        step: int | None = None,
        probe: Probe | Sequence[Probe] | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        loss_scale: float | None = None,
        metrics: Mapping[str, float | None] | None = None,
        canary: bool | None = None,
    ) -> Decision:
        """Take in one step before its update is applied, and decide what the loop does with it.

        The first step says which guards are on; the others are counted in one warning. An input that a later step
        lacks is named once.

        Args:
            batch: The step's responses, or their sums over all ranks.
            step: Its number, counted from 1; one after the last unless given.
            probe: Log-probs of a few fixed tokens on both sides after the weights were sent; of several engines one
                each.
            loss: The loss of this update.
            grad_norm: The norm of its gradient, before clipping.
            learning_rate: The learning rate of this update.
            loss_scale: The loss scale of FP16, where a scaler leaves out a gradient that is not finite; without one
                such a gradient is a fault.
            metrics: Any others by name (docs/train-metrics.md); None is absent.
            canary: Whether both sides hold the same weights, just sent and not updated since; unless given, the first
                step observed is.

        Raises:
            UsageError: The arrays do not fit together, an input is of another kind or below 0 where it cannot be, the
                batch holds nothing, or the step is no whole number after the last one. Guards are then as they were.
        """
        is_canary = self._last_step is None if canary is None else flag_of(canary, "canary")
        probes = probes_of(probe)
        sums = sums_of(batch, is_first=self._last_step is None)
        learnt = self._learnt(
            {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "loss_scale": loss_scale}, metrics
        )
        number = next_step(step, self._last_step)
        measured, withheld = ({}, ()) if sums is None else self._entropies.measured(sums)
        values = (self._probed.take(probes) if probes else {}) | measured | learnt
        warnings = tell_of_left_out(number, sums, self._warned_of)
        self._warned_of = tell_of_base(number, sums, self._entropies.base, warnings)
        return self.judge(number, values, canary=is_canary, withheld=withheld)

    def judge(self, step: int, metrics: Values, *, canary: bool, withheld: Collection[str] = ()) -> Decision:
        """As `observe`, of metrics that were computed. withheld: those that this step lacks and others may give: one
        side is a copy of the other, or it is open whether entropies are in nats.
        """
        is_first, self._last_step = self._last_step is None, step
        metrics = self._seen.take(metrics) | dict(metrics)
        self._history.append((step, metrics))
        if is_first:
            self._book = GuardBook(self._split({*metrics, *withheld}, self._settings, has_canary=canary))
            if self.off:
                warnings.warn(self.explain().off_sentence, stacklevel=3)
        elif self._later:
            self._book.join(self._split({*metrics, *withheld}, self._later, has_canary=canary))
        self._later = ()
        firings = StepFirings(step)
        if canary:
            firings = self._book.observe_canary(of_canary(metrics), step)
        firings = firings.followed_by(self._book.evaluate(step, metrics, withheld))
        window = Window(dict(self._history), self._events)
        firings = self._book.restrain(lambda event: restrained(event, window), firings)
        lacking = [name for name in firings.missing if name not in withheld]
        self._warned_of = warn_of_lacking(step, lacking, metrics, self._warned_of)
        decision = self._decided(firings)
        is_clean = self._is_clean(decision)
        self._good.count(step, is_clean=is_clean, is_judged=not self._book.read_for_rollbacks & set(firings.missing))
        decision = self._with_a_way_back(decision)
        if decision.factor != 1:
            return decision
        return replace(decision, raised=self._rate.raise_after(is_clean=is_clean))

    def observe_update(
        self,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        loss_scale: float | None = None,
        metrics: Mapping[str, float | None] | None = None,
    ) -> Decision:
        """Take in a later update of the step that was observed last, before it is applied: for guards that read
        nothing but these inputs it is one more step; the others are left out.

        Args:
            loss: As in `observe`, and so are the others.
            grad_norm: The norm of its gradient, before clipping.
            learning_rate: The learning rate of this update.
            loss_scale: The loss scale of FP16.
            metrics: Any others by name.

        Raises:
            UsageError: No step was observed, or an input is no number, or below 0 where it cannot be.
        """
        if self._last_step is None:
            raise UsageError("there is no step that this update belongs to: call observe first")
        learnt = self._learnt(
            {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "loss_scale": loss_scale}, metrics
        )
        return self.judge_update(self._last_step, learnt)

    def judge_update(self, step: int, metrics: Values) -> Decision:
        """As `observe_update`, of metrics that were computed."""
        self.add(metrics)
        decision = self._decided(self._book.evaluate_update(step, metrics))
        if not self._is_clean(decision):
            self._good.doubt()
        return self._with_a_way_back(decision)

    def add(self, metrics: Values) -> None:
        """What became known of the last step after it was judged; diagnoses look at it."""
        self._history[-1][1].update(metrics)

    def self_test(self, batch: Batch) -> SelfTest:
        """Which of these guards would have fired here: faults planted in copies of a sound batch, each in a run of its
        own. Nothing of it is remembered.

        Args:
            batch: A sound step of the loop, with both sides' log-probs.

        Raises:
            UsageError: The batch lacks a side's log-probs, or its arrays do not fit together.
        """
        return run_self_test(batch, lambda: silent_judge(Guards(self._settings, can=self._can).observe))

    def diagnosis(self) -> Diagnosis:
        """The likely cause of what the guards said last."""
        return diagnose(dict(self._history), self._events)

    def state_dict(self) -> dict[str, Any]:
        """Strict JSON; belongs into every checkpoint."""
        return {
            **self._book.state(),
            "off": {name: list(lacking) for name, lacking in self.off.items()},
            "last_step": self._last_step,
            "probed": self._probed.state(),
            "batches": self._seen.state(),
            "entropies": self._entropies.state(),
            "history": [[step, strict_json(metrics)] for step, metrics in self._history],
            "events": [event.as_json() for event in self._events],
            "good": self._good.state(),
            "rate": self._rate.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; what it lacks, guards too, is as at the start: a version before did not have it.

        Raises:
            UsageError: it is of other guards, or no mapping.
            BrokenRecord: it is no state of guards. Guards are then as they were.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"the state of guards is {kind_of_value(state)}: give what state_dict gave")
        if not {"guards", "evaluated"} <= state.keys():
            raise BrokenRecord("this is no state of guards: give what state_dict gave")
        restored = Guards(self._settings, self._can)
        try:
            restored._restore(state)
            restored._rehearse()
        except MismatchProbeError:
            raise
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BrokenRecord(
                f"this is no state of guards ({message_of(error)}): give what state_dict gave"
            ) from error
        self.__dict__.update(restored.__dict__)
        if later := ", ".join(guard.name for guard in self._later):
            warnings.warn(f"the state of guards knows nothing of {later}: they begin anew", stacklevel=2)

    def _restore(self, state: Mapping[str, Any]) -> None:
        off = {name: tuple(lacking) for name, lacking in state.get("off", {}).items()}
        kept = {saved["settings"]["name"] for saved in state["guards"]}
        self._later = tuple(guard for guard in self._settings if guard.name not in {*off, *kept})
        book = GuardBook(tuple(guard for guard in self._settings if guard.name in kept))
        book.restore(state)
        self._book, self.off = book, off
        last_step = state.get("last_step", 0 if state["evaluated"] else None)
        self._last_step = None if last_step is None else step_of(last_step)
        self._probed = ProbedEngines.of_state(state.get("probed"))
        history = ((step, {name: float(of[name]) for name in of}) for step, of in state.get("history", ()))
        self._history = deque(history, maxlen=_HISTORY_STEPS)
        self._seen = SeenBatches.of_state(state.get("batches"), (values for _, values in self._history))
        self._entropies = EntropyBase.of_state(state.get("entropies", {}))
        self._events = [GuardEvent.from_json(event) for event in state.get("events", ())]
        self._good = GoodSteps.under(self._settings)
        if "good" in state:
            self._good.restore(state["good"])
        if "rate" in state:
            self._rate.restore(state["rate"])

    def _rehearse(self) -> None:
        """A step in a copy, which ends in an error where something of the state is of another kind than it was."""
        metrics = {name: 1.0 for guard in self._settings for name in guard.metrics}
        with warnings.catch_warnings(), suppress(MismatchProbeError):
            warnings.simplefilter("ignore")
            copy.deepcopy(self).judge((self._last_step or 0) + 1, metrics, canary=False)

    def _learnt(self, inputs: Mapping[str, float | None], metrics: Mapping[str, float | None] | None) -> Metrics:
        last = self._history[-1][1] if self._history else {}
        return learnt_of(inputs, metrics, overflows=last.get("optim/overflows_in_a_row", 0.0))

    def _split(
        self, metrics: Collection[str], guards: Collection[GuardSettings], *, has_canary: bool
    ) -> tuple[GuardSettings, ...]:
        """Those of the guards that this loop can serve; the others are off."""
        lacking = {guard.name: guard.lacks(metrics, has_canary=has_canary) for guard in guards}
        self.off |= {name: lacks for name, lacks in lacking.items() if lacks}
        return tuple(guard for guard in guards if not lacking[guard.name])

    def _is_clean(self, decision: Decision) -> bool:
        return not decision.gives_up and self.doubted_since is None

    def _with_a_way_back(self, decision: Decision) -> Decision:
        decision = replace(decision, last_good_step=self.last_good_step)
        if decision.rollback:
            self.went_back(decision.last_good_step)
        if decision.factor != 1:
            self._rate.lower(decision.factor, rolls_back=decision.rollback)
        return decision

    def _decided(self, firings: StepFirings) -> Decision:
        self._events = [*self._events, *firings.events][-_HISTORY_STEPS * len(self._settings) :]
        return Decision(
            firings=firings,
            metrics=NameLookup(self._history[-1][1]),
            can=self._can,
            diagnosis=self.diagnosis() if firings.events else None,
        )


def of_canary(metrics: Values) -> Metrics:
    """What is known of weights just synced, before anything is learnt from them."""
    return {name: value for name, value in metrics.items() if name.startswith(_OF_A_CANARY)}
