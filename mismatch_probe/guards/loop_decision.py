"""What a training loop is to do with a step, by what it said it can do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from mismatch_probe.guards.actions import Action, ActionKind
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent, StepFirings

_GIVES_UP_UPDATE: Final = frozenset({ActionKind.SKIP_UPDATE, ActionKind.ROLLBACK, ActionKind.STOP})


@dataclass(frozen=True)
class Decision:
    """What the loop is to do with a step, and why. metrics: what the guards saw. can: what the loop said it can do.
    diagnosis: the likely cause, where a guard fired. last_good_step: a rollback goes to the newest checkpoint that was
    taken after the update of this step, or of one before; to the oldest where there is none. raised: what a rate that
    was lowered is multiplied by, because the run is sound again.
    """

    firings: StepFirings
    metrics: Mapping[str, float]
    can: frozenset[ActionKind]
    diagnosis: Diagnosis | None = None
    last_good_step: int = 0
    raised: float = 1.0

    def followed_by(self, later: Self) -> Self:
        """With what was said of a later update of the same step."""
        return replace(
            self,
            firings=self.firings.followed_by(later.firings),
            diagnosis=later.diagnosis or self.diagnosis,
            last_good_step=min(self.last_good_step, later.last_good_step),
        )

    @property
    def step(self) -> int:
        return self.firings.step

    @property
    def events(self) -> tuple[GuardEvent, ...]:
        """The guards that fired."""
        return self.firings.events

    @property
    def actions(self) -> tuple[Action, ...]:
        """All that was asked for, the strongest first."""
        return self.firings.actions

    @property
    def gives_up(self) -> bool:
        """Whether guards ask that this update is not applied, which stands for what a loop cannot leave out of it."""
        gives_up = _GIVES_UP_UPDATE if ActionKind.LEAVE_OUT in self.can else {*_GIVES_UP_UPDATE, ActionKind.LEAVE_OUT}
        return any(action.kind in gives_up for action in self.actions)

    @property
    def skip(self) -> bool:
        """Do not apply this update: asked for as such, or because the run is to go back or to stop."""
        return self.gives_up and ActionKind.SKIP_UPDATE in self.can

    @property
    def stop(self) -> bool:
        """End the run; `diagnosis` says why."""
        return self._asks(ActionKind.STOP) is not None

    @property
    def rollback(self) -> bool:
        """Go back to the newest checkpoint that `last_good_step` allows; not where the run stops."""
        return self._asks(ActionKind.ROLLBACK) is not None and not self.stop

    @property
    def resync(self) -> bool:
        """Send the weights to the engine again."""
        return self._asks(ActionKind.RESYNC) is not None

    @property
    def leave_out(self) -> bool:
        """Leave the responses whose reward is no number out of the loss, and of what others are compared with."""
        return self._asks(ActionKind.LEAVE_OUT) is not None

    @property
    def factor(self) -> float:
        """The learning rate is multiplied by this from now on; 1 where it stays, more where it is raised again."""
        return self._factor(ActionKind.LOWER_LEARNING_RATE) * self.raised

    @property
    def tighten(self) -> float:
        """The bound on abs(S) of a response in the loss is multiplied by this; 1 where it stays."""
        return self._factor(ActionKind.TIGHTEN_SEQUENCES)

    @property
    def unsupported(self) -> tuple[Action, ...]:
        """What was asked for and the loop cannot do."""
        return tuple(action for action in self.actions if not action.kind.is_possible(self.can))

    def __str__(self) -> str:
        """A line for each guard that fired; the diagnosis where the run stops."""
        lines = [f"step {self.step}: {event.guard}: {event.sentence}" for event in self.events]
        if self.unsupported:
            lines.append(f"asked for and not possible here: {', '.join(map(str, self.unsupported))}")
        if self.stop and self.diagnosis is not None:
            lines.append(str(self.diagnosis))
        return "\n".join(lines) or f"step {self.step}: no guard fired"

    def _asks(self, kind: ActionKind) -> Action | None:
        """What was asked for of this kind, where the loop can do it."""
        return next((action for action in self.actions if action.kind is kind and kind in self.can), None)

    def _factor(self, kind: ActionKind) -> float:
        action = self._asks(kind)
        return 1.0 if action is None or action.factor is None else action.factor
