"""Which guards are on in a loop, what the others lack, and which answers the loop cannot give."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.rules.base import GuardSettings, Values


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, each as wide as its widest cell."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    return "\n".join(line.rstrip() for line in lines)


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
    """One guard. is_on: None before the first step. needs: the inputs it reads; lacks: those that were not given.
    answers: what its first, second, ... firing asks for; unsupported: those of them that the loop cannot do. sees: how
    small a change it would see in steps like the last one, where its rule knows.
    """

    name: str
    is_on: bool | None
    needs: tuple[str, ...]
    lacks: tuple[str, ...]
    answers: tuple[str, ...]
    unsupported: tuple[str, ...]
    sees: str = ""

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
            return "told at the first step"
        return "on" if self.is_on else "off"


@dataclass(frozen=True)
class Explanation:
    """A row for each guard; prints as a table, and below it how small a change shows."""

    guards: tuple[GuardExplanation, ...]

    def __iter__(self) -> Iterator[GuardExplanation]:
        return iter(self.guards)

    @property
    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Under `COLUMNS`."""
        return [
            (
                guard.name,
                guard.state,
                ", ".join(guard.lacks or guard.needs),
                ", ".join(guard.answers),
                ", ".join(guard.unsupported) or "-",
            )
            for guard in self.guards
        ]

    @property
    def off_sentence(self) -> str:
        """How many guards are off, and what names them; empty where none is."""
        num_off = sum(guard.is_on is False for guard in self.guards)
        return (
            f"guards that are off here for lack of an input: {num_off} of {len(self.guards)}; print(guards.explain()) "
            "names them and their inputs"
            if num_off
            else ""
        )

    def __str__(self) -> str:
        sensitivities = [f"{guard.name} sees {guard.sees}." for guard in self.guards if guard.sees]
        return "\n".join((text_table(COLUMNS, self.rows), *sensitivities))


COLUMNS: Final = ("guard", "is", "needs", "asks for", "not possible here")


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


def _input(metric: str) -> str | None:
    return next((name for start, name in _INPUTS.items() if metric.startswith(start)), None)
