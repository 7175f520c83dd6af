"""What guards answer a loop: the decision on a step, and which guards judge it and by what."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, zip_longest
from textwrap import fill, wrap
from typing import ClassVar, Final, Self

from mismatch_probe.guards.actions import Action, ActionKind
from mismatch_probe.guards.diagnosis import Diagnosis, GuardEvent, StepFirings
from mismatch_probe.guards.rules.base import GuardSettings, Values

_GIVES_UP_UPDATE: Final = frozenset({ActionKind.SKIP_UPDATE, ActionKind.ROLLBACK, ActionKind.STOP})


@dataclass(frozen=True)
class Decision:
    """What the loop is to do with a step, and why."""

    firings: StepFirings
    metrics: Mapping[str, float]
    """What the guards saw."""
    can: frozenset[ActionKind]
    """The actions that the loop can take."""
    diagnosis: Diagnosis | None = None
    """The likely cause, where a guard fired."""
    last_good_step: int = 0
    """A rollback goes to the newest checkpoint that was taken after the update of this step, or of one before; to the
    oldest where there is none.
    """
    raised: float = 1.0
    """What a rate that was lowered is multiplied by, because the run is sound again."""

    def followed_by(self, other: Self) -> Self:
        """This decision together with that on a later update of the same step."""
        return replace(
            self,
            firings=self.firings.followed_by(other.firings),
            diagnosis=other.diagnosis or self.diagnosis,
            last_good_step=min(self.last_good_step, other.last_good_step),
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
        return self._factor_of_kind(ActionKind.LOWER_LEARNING_RATE) * self.raised

    @property
    def tighten(self) -> float:
        """The bound on abs(S) of a response in the loss is multiplied by this; 1 where it stays."""
        return self._factor_of_kind(ActionKind.TIGHTEN_SEQUENCES)

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

    def _factor_of_kind(self, kind: ActionKind) -> float:
        action = self._asks(kind)
        return 1.0 if action is None or action.factor is None else action.factor


TABLE_WIDTH: Final = 100
"""Characters of a line that is printed; few people have a wider terminal next to their editor."""


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side in `TABLE_WIDTH`, where no word is wider: a cell of the widest columns goes on below."""
    widths = _column_widths([columns, *rows])
    lines = []
    for row in (columns, *rows):
        cells = [
            wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Each column's widest cell; where that is too much, the widest column gives way, down to its longest word."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    least = [max(len(word) for cell in cells for word in cell.split() or [""]) for cells in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > TABLE_WIDTH:
        wide = [column for column, width in enumerate(widths) if width > least[column]]
        if not wide:
            break
        widths[max(wide, key=lambda column: widths[column])] -= 1
    return widths


_INPUTS: Final = {
    "mismatch/temperature_fit": "entropy",
    "mismatch/surprise_": "entropy",
    "mismatch/kl_entropy_ratio": "entropy",
    "policy/entropy": "entropy",
    "mismatch/": "log_pi and log_mu",
    "reward/mean_error": "rewards and prompt_ids",
    "reward/flat_groups_share": "rewards and prompt_ids",
    "reward/mean": "rewards",
    "reward/std": "rewards",
    "reward/whole_range": "rewards",
    "reward/largest": "rewards",
    "reward/typical": "rewards",
    "reward/nonfinite": "rewards",
    "response/truncated_share": "truncated",
    "response/length": "a batch",
    "response/repeats": "log_pi and log_mu",
    "response/returned_after": "log_pi and log_mu",
    "response/steps_not_new": "log_pi and log_mu",
    "optim/loss": "loss",
    "optim/grad_norm": "grad_norm",
    "optim/nonfinite_gradients": "grad_norm",
    "optim/overflow": "grad_norm",
    "optim/learning_rate": "learning_rate",
    "sync/engine_unchanged": "probe",
    "sync/probe": "probe",
    "update/policy_shift_": "probe",
    "a canary's ": "canary=True at the first step",
}
"""The argument of `Batch` or `Guards.observe` that gives a metric, by its name or how it begins, the longer first."""


@dataclass(frozen=True)
class GuardExplanation:
    """One guard."""

    name: str
    is_on: bool | None
    """Whether the run gives what it needs; None before the first step."""
    needs: tuple[str, ...]
    """The inputs it reads."""
    lacks: tuple[str, ...]
    """Those that were not given."""
    answers: tuple[str, ...]
    """What its first, second, ... firing asks for."""
    unsupported: tuple[str, ...]
    """Those of them that the loop cannot do."""
    sees: str = ""
    """How small a change it would see in steps like the last one, where its rule knows."""

    UNTIL_A_STEP: ClassVar[str] = "known at the first step"

    @classmethod
    def of(
        cls,
        settings: GuardSettings,
        *,
        is_on: bool | None,
        lacking: Collection[str],
        values: Values,
        can: Collection[ActionKind],
    ) -> Self:
        """lacking: metrics that it reads and no step gives. given: metrics of the last step."""
        actions = [action for firing in settings.actions for action in firing]
        return cls(
            settings.name,
            is_on,
            inputs_of(settings.metrics),
            inputs_of(lacking, values),
            tuple(" + ".join(map(str, firing)) for firing in settings.actions),
            tuple(dict.fromkeys(str(action) for action in actions if not action.kind.is_possible(can))),
            settings.sees(values),
        )

    @property
    def state(self) -> str:
        if self.is_on is None:
            return self.UNTIL_A_STEP
        return "on" if self.is_on else "off"


@dataclass(frozen=True)
class GuardExplanations:
    """A row for each guard; prints as a table, and below it how small a change shows."""

    guards: tuple[GuardExplanation, ...]

    def __iter__(self) -> Iterator[GuardExplanation]:
        return iter(self.guards)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Under `COLUMNS`; an answer that is asked for several times in a row stands there once, with their number.

        Of a guard that is off only what it lacks is named; a star is behind an action that this loop cannot do.
        """
        return [
            (
                guard.name,
                {True: "on", False: "off", None: "?"}[guard.is_on],
                ", ".join(guard.lacks or guard.needs),
                ", ".join(_counted_answers(guard)),
            )
            for guard in self.guards
        ]

    @property
    def off_sentence(self) -> str:
        """How many guards are off, and what names them; empty where none is."""
        return off_sentence(sum(guard.is_on is False for guard in self.guards), len(self.guards))

    def __str__(self) -> str:
        sensitivities = [f"{guard.name} sees {guard.sees}." for guard in self.guards if guard.sees]
        lines = [fill(line, TABLE_WIDTH, break_on_hyphens=False) for line in sensitivities]
        return "\n".join((text_table(COLUMNS, self.rows), *self._footnotes, *lines))

    @property
    def _footnotes(self) -> list[str]:
        notes = {
            f"?  {GuardExplanation.UNTIL_A_STEP}": any(guard.is_on is None for guard in self.guards),
            "*  not possible in this loop, by what it says that it can do": any(g.unsupported for g in self.guards),
        }
        return [note for note, applies in notes.items() if applies]


COLUMNS: Final = ("guard", "is", "needs", "asks for")


def off_sentence(num_off: int, num_guards: int) -> str:
    """As `GuardExplanations.off_sentence`, for a loop that wants no table."""
    return (
        f"guards that are off here for lack of an input: {num_off} of {num_guards}; print(guards.explain()) "
        "names them and their inputs"
        if num_off
        else ""
    )


def _counted_answers(guard: GuardExplanation) -> list[str]:
    """`skip_update + resync* (4 times)` in place of four in a row."""
    answers_with_star = [
        " + ".join(f"{action}*" if action in guard.unsupported else action for action in answer.split(" + "))
        for answer in guard.answers
    ]
    runs = [(answer, len(list(same))) for answer, same in groupby(answers_with_star)]
    return [answer if number == 1 else f"{answer} ({number} times)" for answer, number in runs]


def inputs_of(metrics: Collection[str], extra: Collection[str] = ()) -> tuple[str, ...]:
    """The inputs that give these metrics. An input that gives some of those `given` cannot give another one of its
    kind: such a metric has to be given by its name.
    """
    extra_inputs = {_input(metric) for metric in extra}
    inputs = {metric: _input(metric) for metric in metrics}
    return tuple(
        dict.fromkeys(
            f"metrics[{metric!r}]" if input_name is None or input_name in extra_inputs else input_name
            for metric, input_name in inputs.items()
        )
    )


@lru_cache(maxsize=1024)
def _input(metric: str) -> str | None:
    """Remembered, for each guard asks for those of all metrics of a step."""
    return next((name for start, name in _INPUTS.items() if metric.startswith(start)), None)
