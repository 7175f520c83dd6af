"""What a person sees while a run trains: a screen of the last values on a terminal, one line a step elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from mismatch_probe.cli.training_screen import training_screen
from mismatch_probe.guards.decision import StepFirings
from mismatch_probe.notation import write_number
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.distributed import is_main
from mismatch_probe.train.trainer import Listener

_COLUMNS = (
    ("reward", "reward/mean"),
    ("k3", "mismatch/kl_k3"),
    ("pi-mu max", "mismatch/prob_diff_max"),
    ("entropy", "policy/entropy"),
    ("grad", "optim/grad_norm"),
    ("length", "response/length_mean"),
    ("s", "time/step_seconds"),
)


@contextmanager
def training_view(console: Console, directory: TrainingDirectory, steps: int) -> Iterator[Listener]:
    """A listener that shows each step, for as long as the run goes on; ranks other than the first show nothing."""
    if not is_main():
        yield lambda step, metrics, decision: None
        return
    console.print(f"Run directory: {directory.path}", soft_wrap=True, highlight=False)
    if console.is_terminal:
        with training_screen(console, directory, steps) as screen:
            yield screen
        return

    def print_line(step: int, metrics: Mapping[str, float], decision: StepFirings) -> None:
        values = "  ".join(f"{title} {write_number(metrics[name])}" for title, name in _COLUMNS)
        console.print(f"step {step}/{steps}  {values}", soft_wrap=True, highlight=False)
        for event in decision.events:
            actions = ", ".join(str(action) for action in event.actions)
            console.print(f"  guard {event.guard}: {event.sentence} [{actions}]", soft_wrap=True, highlight=False)

    yield print_line
