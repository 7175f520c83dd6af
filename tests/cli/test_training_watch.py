"""What a person sees while a run trains: lines, a screen, a page that keeps up; none of it can end the run."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.cli import training_watch as reporting
from mismatch_probe.cli.training_watch import Screen, sparkline, training_report, training_view, watch_training
from mismatch_probe.guards.actions import parse_action
from mismatch_probe.guards.diagnosis import GuardEvent, StepFirings
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.trainer import StepListener
from tests.report.training.training_runs import TrainingSample, training_run

SENTENCE = "mismatch/kl_k3 is 0.02, above its limit of 0.015"


def fired(step: int, action: str) -> StepFirings:
    limit = ("limit", "mismatch/kl_k3", 0.02, 0.015, 1)
    return StepFirings(step, (GuardEvent(step, "mismatch-limit", *limit, (parse_action(action),), SENTENCE),))


def console(*, terminal: bool = False, width: int = 100) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=terminal, width=width, markup=False), output


def replay(
    directory: TrainingDirectory, listen: StepListener, decide: Callable[[int], StepFirings] = StepFirings
) -> None:
    for step, metrics in directory.read_metrics():
        listen(step, metrics, decide(step))


def shown(screen: Screen, width: int = 100) -> str:
    people, output = console(width=width)
    people.print(screen)
    return output.getvalue()


@pytest.fixture
def directory(tmp_path: Path) -> TrainingDirectory:
    return training_run(tmp_path / "run", TrainingSample(steps=8, outcome="unfinished"))


@pytest.fixture
def another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_without_a_terminal_each_step_is_a_line_and_each_firing_one_below(directory: TrainingDirectory) -> None:
    people, output = console()
    with training_view(people, directory, 60) as view:
        replay(directory, view, lambda step: fired(step, "warn") if step == 5 else StepFirings(step))
    lines = output.getvalue().splitlines()
    assert lines[0] == f"Run directory: {directory.path}"
    assert [line.split()[1] for line in lines if line.startswith("step")] == [f"{step}/60" for step in range(1, 9)]
    assert lines[lines.index(f"  guard mismatch-limit: {SENTENCE} [warn]") - 1].startswith("step 5/60")


def test_a_step_whose_values_are_no_numbers_is_shown_and_ends_nothing(tmp_path: Path) -> None:
    broken = {2: {"reward/mean": math.nan, "mismatch/kl_k3": 0.0}}
    directory = training_run(tmp_path / "run", TrainingSample(steps=3, overflows=(2,), changes=broken))
    people, output = console()
    with training_view(people, directory, 3) as view:
        replay(directory, view)
    assert "reward nan  k3 0 " in output.getvalue()
    assert "grad inf" in output.getvalue()
    screen = Screen(directory, 3)
    replay(directory, screen)
    assert "×" in shown(screen)


def test_the_screen_shows_progress_values_and_time_left(directory: TrainingDirectory) -> None:
    screen = Screen(directory, 60)
    assert "engine, policy and first step starting" in shown(screen)
    replay(directory, screen)
    text = shown(screen)
    for words in (
        "step 8 of 60",
        "tokens/s",
        " left",
        "this step",
        "reward",
        "mismatch (k3)",
        "entropy",
        "guards silent",
    ):
        assert words in text
    screen.running = False
    assert " left" not in shown(screen)


def test_the_screen_shows_the_last_firings_and_how_many_there_were(directory: TrainingDirectory) -> None:
    screen = Screen(directory, 60)
    replay(directory, screen, lambda step: fired(step, "rollback"))
    text = shown(screen)
    assert "guards fired 8 times, lately:" in text
    assert "step 8  mismatch-limit" in text
    assert "step 3 " not in text


def test_the_screen_of_a_resumed_run_remembers_the_steps_before(directory: TrainingDirectory) -> None:
    screen = Screen(directory, 60)
    step, metrics = list(directory.read_metrics())[-1]
    screen(step, metrics, StepFirings(step))
    [line] = [line for line in shown(screen).splitlines() if line.startswith("reward")]
    assert sum(letter in "▁▂▃▄▅▆▇█" for letter in line) == 8


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_screen_never_breaks_a_line_of_values(width: int, directory: TrainingDirectory) -> None:
    screen = Screen(directory, 60)
    replay(directory, screen, lambda step: fired(step, "warn"))
    assert max(map(len, shown(screen, width).splitlines())) <= width


def test_on_a_terminal_the_screen_is_drawn_and_what_is_printed_stays_above_it(directory: TrainingDirectory) -> None:
    people, output = console(terminal=True)
    with training_view(people, directory, 60) as view:
        replay(directory, view)
        people.print("a sentence from elsewhere")
    assert "step 8 of 60" in output.getvalue()
    assert "a sentence from elsewhere\n" in output.getvalue()


def test_a_sparkline_goes_from_lowest_to_highest_and_crosses_out_what_is_no_number() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], logarithmic=False) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 10, 100], logarithmic=True) == "▁▅█"
    assert sparkline([0.5, math.nan, math.inf, 1.0], logarithmic=False) == "▁××█"
    assert sparkline([0.0, 1.0], logarithmic=True) == "×▁"
    assert sparkline([3.0, 3.0], logarithmic=False) == "▁▁"
    assert sparkline([math.nan], logarithmic=False) == "×"
    assert sparkline([], logarithmic=False) == ""


def test_the_page_is_written_when_the_run_ends_however_it_ends(directory: TrainingDirectory) -> None:
    for end in (KeyboardInterrupt, RuntimeError):
        directory.report_path.unlink(missing_ok=True)
        with pytest.raises(end), training_report(directory, pytest.fail):
            raise end
        assert "Unfinished after step 8 of 60" in directory.report_path.read_text()


def test_the_page_costs_a_hundredth_of_the_time(directory: TrainingDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now)
    with training_report(directory, pytest.fail) as listen:
        replay(directory, listen)
        assert not directory.report_path.exists()
        now += 101
        replay(directory, listen)
        assert directory.report_path.exists()


def test_a_page_that_cannot_be_written_is_said_once_and_the_run_goes_on(directory: TrainingDirectory) -> None:
    directory.report_path.mkdir()
    messages: list[str] = []
    with training_report(directory, messages.append) as listen:
        replay(directory, listen)
        listen.write()
    [sentence] = messages
    assert sentence.startswith("report.html is not written (StorageError: cannot write")


def test_ranks_other_than_the_first_show_and_write_nothing(directory: TrainingDirectory, another_rank: None) -> None:
    people, output = console()
    with watch_training(people, directory, directory.read_training_manifest().settings) as listen:
        replay(directory, listen)
    assert output.getvalue() == ""
    assert not directory.report_path.exists()


@pytest.mark.slow
def test_all_that_looks_on_is_told_of_every_step(directory: TrainingDirectory) -> None:
    people, output = console()
    settings = directory.read_training_manifest().settings.model_copy(update={"report_to": ("tensorboard",)})
    with watch_training(people, directory, settings) as listen:
        replay(directory, listen)
    assert output.getvalue().count("\nstep ") == 8
    assert directory.report_path.exists()
    assert list((directory.path / "tensorboard").iterdir())
