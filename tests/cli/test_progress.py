"""What people see of a run's progress: lines where stderr is no terminal, one line that is redrawn on a terminal."""

import re
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.cli import progress as module
from mismatch_probe.cli.progress import (
    LINE_EVERY_SECONDS,
    Announcement,
    Later,
    number_of_later_part,
    progress_line,
    progress_listener,
    stage_words,
)
from mismatch_probe.compare.cost.earlier import Measurement
from mismatch_probe.compare.cost.forecast import RunClock
from mismatch_probe.compare.cost.stage_work import key_of, work_of
from mismatch_probe.compare.plan import (
    AnyEvent,
    BatchDone,
    JobStarted,
    RequestsDone,
    StageDone,
    StageStarted,
    make_plan,
)
from mismatch_probe.compare.stages import Stage
from mismatch_probe.config.load import parse_side
from mismatch_probe.records.manifest import StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from tests.compare.cost.workloads import settings, workload
from tests.simulated_run import Simulation, edit_manifest, simulated_run

STAGE, SAMPLES = "sample-bf16", "the engine samples in BF16"
REFERENCE = "the FP32 reference scores the responses"
At = Callable[[float, AnyEvent], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return simulated_run(tmp_path_factory.mktemp("progress") / "run", Simulation(num_prompts=2))


PARTS = 3
"""The engine, the reference and the training side."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> Iterator[At]:
    """Has an event arrive at a second; gives the line that it leaves."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    output = StringIO()
    with progress_listener(Console(file=output), run) as listener:

        def arrive(second: float, event: AnyEvent) -> str:
            clock[0] = second
            begun = len(output.getvalue())
            listener(event)
            return output.getvalue()[begun:].strip()

        yield arrive


def batch(tokens: int = 100, seconds: float = 10) -> BatchDone:
    return BatchDone(stage=STAGE, sequences=4, tokens=tokens, seconds=seconds)


def test_a_line_says_when_an_engine_starts_and_which_stage_is_the_first(at: At) -> None:
    started = at(0, JobStarted(process="engine", stages=[STAGE, "replay-bf16"]))
    assert started == f"part 1 of {PARTS}: starting the engine"
    assert at(9, StageStarted(stage=STAGE, batches=4, batches_done=0)) == f"part 1 of {PARTS}: {SAMPLES}"


def test_a_job_that_goes_on_is_in_the_stage_that_it_goes_on_with(at: At) -> None:
    started = at(0, JobStarted(process="training", stages=["score-ref-fp32"]))
    assert started == f"part 2 of {PARTS}: loading the model on the training path"


def test_stages_that_do_the_same_in_words_are_one_line() -> None:
    output = StringIO()
    with progress_line(Console(file=output)) as line:
        for _ in range(3):
            line.begin("the training path measures its noise floor in BF16", 3, 3)
        line.begin("the training path measures its noise floor in BF16", 3, 3, "2 of 4 batches recorded")
    assert output.getvalue().splitlines() == [
        "part 3 of 3: the training path measures its noise floor in BF16",
        "part 3 of 3: the training path measures its noise floor in BF16, 2 of 4 batches recorded",
    ]


def test_every_stage_of_a_plan_has_words() -> None:
    """Also where experts are recorded, prefixes are cached and a server samples."""
    changes = {
        "engine": {"prefix_caching": True},
        "infer": [parse_side("infer", text) for text in ("bf16", "prod:url=http://host")],
    }
    train, pairs = [parse_side("train", "mine:dtype=bf16")], [["mine", "bf16"], ["mine", "prod"]]
    stages = make_plan(settings(train=train, pairs=pairs, **changes)).stages
    words = {stage_words(stage) for stage in stages}
    assert {type(stage) for stage in stages} == set(module._STAGE_WORDS)
    assert {
        "the engine samples in BF16",
        "the server samples in prod",
        "the training path scores the responses in mine",
    } <= words
    assert "the FP32 reference with BF16 weights scores" in words


def test_lines_are_sparse(at: At) -> None:
    at(0, StageStarted(stage=STAGE, batches=4, batches_done=0))
    assert at(5, batch(seconds=5)) == ""
    assert at(20, batch(seconds=15)) == ""
    assert at(LINE_EVERY_SECONDS, batch(seconds=10)) == f"part 1 of {PARTS}: {SAMPLES}, 3 of 4 batches, 10 tokens/s"
    assert at(40, batch(seconds=10)) == ""


def test_a_slow_stage_has_a_rate_above_0(at: At) -> None:
    at(0, StageStarted(stage=STAGE, batches=4, batches_done=0))
    assert at(LINE_EVERY_SECONDS, batch(seconds=400)).endswith("1 of 4 batches, 0.25 tokens/s")


def test_what_was_recorded_before_a_resume_is_said(at: At) -> None:
    assert at(0, StageStarted(stage=STAGE, batches=100, batches_done=90)).endswith("90 of 100 batches recorded")
    assert at(LINE_EVERY_SECONDS, batch()).endswith("91 of 100 batches, 10 tokens/s")


def test_a_batch_in_flight_says_how_far_it_is(at: At) -> None:
    at(0, StageStarted(stage=STAGE, batches=2, batches_done=0))
    assert at(5, RequestsDone(stage=STAGE, done=8, of=64)) == ""
    line = at(LINE_EVERY_SECONDS, RequestsDone(stage=STAGE, done=16, of=64))
    assert line == f"part 1 of {PARTS}: {SAMPLES}, 16 of 64 responses of batch 1 of 2"


def test_behind_the_last_stage_come_the_statistics(at: At, run: RunDirectory) -> None:
    last = make_plan(run.read_manifest().settings).stages[-1].name
    at(0, StageStarted(stage=last, batches=1, batches_done=0))
    assert at(1, StageDone(stage=last)) == "statistics and verdict"


def test_a_stage_of_no_plan_has_no_number(at: At) -> None:
    assert at(0, StageStarted(stage="sample-training-path", batches=1, batches_done=0)) == "sample training path"


def test_stages_that_no_clock_knows_are_counted_and_the_last_is_timed_by_its_own_batches(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    _, _, clock = two_stages(run)
    output = StringIO()
    with progress_listener(
        Console(file=output), run, clock, {"sample-train-bf16": "the training path samples in BF16"}
    ) as listener:
        listener(StageStarted(stage=STAGE, batches=1, batches_done=0))
        listener(StageStarted(stage="sample-train-bf16", batches=4, batches_done=1))
        now[0] = LINE_EVERY_SECONDS
        listener(BatchDone(stage="sample-train-bf16", sequences=4, tokens=600, seconds=30))
        listener(StageDone(stage="sample-train-bf16"))
    last = f"part {PARTS + 1} of {PARTS + 1}"
    assert output.getvalue().splitlines()[1:] == [
        f"part 1 of {PARTS + 1}: {SAMPLES}",
        f"{last}: the training path samples in BF16, 1 of 4 batches recorded",
        f"{last}, about 60 s left: the training path samples in BF16, 2 of 4 batches, 20 tokens/s",
        "statistics and verdict",
    ]


@pytest.mark.parametrize(("seconds", "left"), [(None, ""), (100.0, ", about 5 min left")])
def test_a_part_that_follows_is_counted_and_its_time_is_in_what_is_left(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, seconds: float | None, left: str
) -> None:
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0)
    _, _, clock = two_stages(run)
    output = StringIO()
    with progress_listener(Console(file=output), run, clock, last_part=Later("headroom", seconds)) as listener:
        listener(StageStarted(stage=STAGE, batches=1, batches_done=0))
    assert output.getvalue().splitlines()[1:] == [f"part 1 of {PARTS + 1}{left}: {SAMPLES}"]
    assert number_of_later_part(run) == PARTS + 1


def test_a_check_of_rounding_that_a_run_gets_later_is_a_part_of_its_own_behind_all_others(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2))
    output, check = StringIO(), "score-ref-fp64"
    with progress_listener(Console(file=output), run) as listener:
        listener(StageStarted(stage="score-train-bf16", batches=1, batches_done=0))
        edit_manifest(run, lambda manifest: manifest.rounding_checks.append("bf16"))
        edit_manifest(run, lambda manifest: manifest.stages.update({check: StageRecord()}))
        listener(JobStarted(process="training", stages=[check]))
        listener(StageStarted(stage=check, batches=1, batches_done=0))
    assert output.getvalue().splitlines()[1:] == [
        f"part {PARTS} of {PARTS}: the training path scores the responses in BF16",
        f"part {PARTS + 1} of {PARTS + 1}: loading the model on the training path",
        f"part {PARTS + 1} of {PARTS + 1}: the FP64 reference scores the responses",
    ]
    assert number_of_later_part(run) == PARTS + 2


def two_stages(run: RunDirectory) -> tuple[Stage, Stage, RunClock]:
    """Stages that took 100 s each in an earlier run, and the clock of a run that has both to do."""
    first, second = make_plan(run.read_manifest().settings).stages[:2]
    known = workload(model={"path": "simulated"})
    earlier = [Measurement(key_of(stage), work_of(stage, known), 100, 0) for stage in (first, second)]
    return first, second, RunClock([first, second], known, earlier)


def shown(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, *, is_terminal: bool, width: int = 120) -> str:
    """What people see of the first of `two_stages`, which takes 100 s."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    first, second, clock = two_stages(run)
    output = StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=width)
    with progress_listener(console, run, clock) as listener:
        listener(StageStarted(stage=first.name, batches=1, batches_done=0))
        now[0] = 100.0
        listener(BatchDone(stage=first.name, sequences=8, tokens=400, seconds=100))
        listener(StageDone(stage=first.name))
        listener(StageStarted(stage=second.name, batches=1, batches_done=0))
    return output.getvalue()


def test_a_line_says_how_much_of_all_stages_is_left(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    _, first, *_, second = shown(monkeypatch, run, is_terminal=False).splitlines()
    assert first == f"part 1 of {PARTS}, about 3 min left: {SAMPLES}"
    assert second == f"part 2 of {PARTS}, about 1.7 min left: {REFERENCE}"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_one_line_that_is_redrawn_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, width: int
) -> None:
    output = shown(monkeypatch, run, is_terminal=True, width=width)
    assert f"part 2 of {PARTS}, about 1.7 min left: {REFERENCE}" in output
    assert output.endswith("\x1b[2K"), "the line is erased at the end"
    rows = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "", row) for row in output.split("\n")]
    assert all(len(row) <= width for row in rows[1:])


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch: pytest.MonkeyPatch, run: RunDirectory) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[2K" not in shown(monkeypatch, run, is_terminal=True)


def test_the_time_that_is_left_runs_down_by_the_clock_and_slides_to_another_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, it showed each estimate as it came: 100 s, then 400 s a second later."""
    now, estimate = [0.0], [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress_line(Console(file=StringIO()), lambda: estimate[0]) as line:
        line.begin("sampling", 1, 3)

        def seconds_left(second: float) -> str:
            now[0] = second
            return str(line)

        assert seconds_left(0) == "part 1 of 3, about 1.7 min left: sampling"
        estimate[0] = 85.0
        assert seconds_left(10) == "part 1 of 3, about 1.5 min left: sampling", "a near estimate changes nothing"
        estimate[0] = 400.0
        assert seconds_left(11) == "part 1 of 3, about 2 min left: sampling"
        for second in range(12, 72):
            seconds_left(second)
        assert seconds_left(72) == "part 1 of 3, about 5 min left: sampling"


def test_the_time_that_a_child_process_says_runs_down_until_it_is_heard_of_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    announced = Announcement()
    assert announced.remaining() is None
    announced.hear(60.0)
    now[0] = 20.0
    assert announced.remaining() == 40.0
    now[0] = 90.0
    assert announced.remaining() == 0.0
    announced.hear(None)
    assert announced.remaining() is None


def test_a_stage_that_takes_long_says_so_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress_line(Console(file=StringIO())) as line:
        line.begin("starting vLLM", 1, 3)
        now[0] = 12.0
        assert line.__rich__().plain == "part 1 of 3: starting vLLM, 12 s"


def test_a_line_that_is_too_long_for_a_narrow_terminal_is_said_in_fewer_words(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def shown(width: int) -> str:
        with progress_line(Console(file=StringIO(), width=width), lambda: 1080.0) as line:
            line.begin("the FP32 reference with BF16 weights scores", 10, 12, "7 of 64 responses of batch 3 of 16")
            now[0] += 12
            return line.__rich__().plain

    line = (
        "part 10 of 12, about 18 min left: the FP32 reference with BF16 weights scores, "
        "7 of 64 responses of batch 3 of 16, 12 s"
    )
    assert shown(120) == line
    assert shown(95) == line.removesuffix(" responses of batch 3 of 16, 12 s") + ", 12 s"
    assert shown(80) == "10 of 12, 18 min left: the FP32 reference with BF16 weights scores, 7 of 64"


def test_a_terminal_shows_something_before_anything_is_heard() -> None:
    with progress_line(Console(file=StringIO()), first="loading the checkpoint") as line:
        assert line.__rich__().plain == "loading the checkpoint"
        line.at("the engine's side", 1, 2, "hypothesis 3 of 40")
        assert line.__rich__().plain == "part 1 of 2: the engine's side, hypothesis 3 of 40"


def test_what_goes_on_in_a_stage_is_no_new_line_and_another_stage_is_one() -> None:
    output = StringIO()
    with progress_line(Console(file=output)) as line:
        for number, side in enumerate(("engine", "training path"), 1):
            for tried in (1, 2, 3):
                line.at(f"the {side}'s side", number, 2, f"hypothesis {tried} of 3")
    assert output.getvalue().splitlines() == [
        "part 1 of 2: the engine's side, hypothesis 1 of 3",
        "part 2 of 2: the training path's side, hypothesis 1 of 3",
    ]
