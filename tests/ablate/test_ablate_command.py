"""`ablate` with real vLLM and the shipped checkpoint: cells in processes of their own, killed, broken, repeated."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import Answer
from tests.halts import wait_until
from tests.train.test_train_command import metrics, steps_written
from tests.warm_python import warm_python

pytestmark = pytest.mark.slow

GRID = (
    *("--model", "demo", "--task", "copy:terms=2", "--num-problems", "8", "--objective", "pg-seq-is"),
    *("--prompts-per-step", "4", "--samples-per-prompt", "2", "--max-new-tokens", "16"),
    *("--learning-rate", "1e-4", "--checkpoint-every", "2", "--steps", "4"),
    *("--precision", "bf16", "--precision", "fp32"),
)
FIRST, SECOND = "bf16-bf16.seed-0", "fp32-fp32.seed-0"
REWARD = ("--reward", "tests.ablate.planted_rewards:picky")


def ablate(*words: object, code: ExitCode = ExitCode.PASS, **how: Any) -> Answer:
    return warm_python("mismatch_probe", "ablate", *words, code=code, **how)


def cell_states(run: Path) -> dict[str, str]:
    return {cell["name"]: cell["state"] for cell in json.loads((run / "ablation.json").read_text())["cells"]}


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ablate") / "run"
    ablate(*GRID, "--out", run)
    return run


def test_each_cell_is_a_training_run_in_its_own_folder(complete_run: Path) -> None:
    assert cell_states(complete_run) == {FIRST: "finished", SECOND: "finished"}
    for name in (FIRST, SECOND):
        cell = complete_run / "cells" / name
        assert [line["step"] for line in metrics(cell)] == [1, 2, 3, 4]
        assert (cell / "report.html").exists()
    dtypes = json.loads((complete_run / "cells" / SECOND / "manifest.json").read_text())["settings"]["train_dtype"]
    assert dtypes == "fp32"


def test_a_killed_ablation_resumes_to_the_same_numbers_and_runs_no_finished_cell_again(
    complete_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    second = run / "cells" / SECOND

    def kill(pid: int) -> None:
        wait_until(lambda: steps_written(second) == 3, "the third step of the second cell", pid)
        os.kill(pid, signal.SIGKILL)

    warm_python("mismatch_probe", "ablate", *GRID, "--out", run, on_start=kill, code=-signal.SIGKILL)
    first_written = (run / "cells" / FIRST / "metrics.jsonl").stat().st_mtime_ns
    ablate("--resume", "--out", run)
    assert (run / "cells" / FIRST / "metrics.jsonl").stat().st_mtime_ns == first_written
    for name in (FIRST, SECOND):
        assert metrics(run / "cells" / name) == metrics(complete_run / "cells" / name)


def test_a_cell_alone_gives_the_same_numbers(complete_run: Path, tmp_path: Path) -> None:
    settings = complete_run / "settings" / f"{FIRST}.yaml"
    warm_python("mismatch_probe", "train", "--config", settings, "--out", tmp_path / "alone")
    assert metrics(tmp_path / "alone") == metrics(complete_run / "cells" / FIRST)


def test_a_cell_that_breaks_is_recorded_with_its_reason_and_the_next_one_runs(tmp_path: Path) -> None:
    run, environment = tmp_path / "run", {"FIRST_CALL": str(tmp_path / "called")}
    answer = ablate(*GRID, *REWARD, "--steps", "1", "--out", run, code=ExitCode.ENVIRONMENT, environment=environment)
    assert cell_states(run) == {FIRST: "broken", SECOND: "finished"}
    assert "a planted fault" in answer.stdout
    refusal = ablate("--resume", "--out", run, code=ExitCode.USAGE, environment=environment).stderr
    assert " ".join(REWARD) in refusal
    ablate("--resume", "--out", run, *REWARD, environment=environment)
    assert cell_states(run) == {FIRST: "finished", SECOND: "finished"}


def test_cells_that_run_side_by_side_give_the_same_numbers_and_the_page_says_that_they_shared_time(
    complete_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "side-by-side"
    progress = ablate(*GRID, "--at-once", "2", "--out", run).stderr
    assert progress.index("cell 2 of 2") < progress.index("finished after")
    assert cell_states(run) == {FIRST: "finished", SECOND: "finished"}
    for name in (FIRST, SECOND):
        assert metrics(run / "cells" / name) == metrics(complete_run / "cells" / name)
    shared = "Up to 2 cells ran at a time"
    assert shared in (run / "report.html").read_text()
    assert shared not in (complete_run / "report.html").read_text()


def test_more_cells_at_once_than_fit_into_memory_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    one_variant = (*GRID[:-2], "--seed", "0", "--seed", "1")
    refusal = ablate(*one_variant, "--at-once", "10000", "--out", tmp_path / "run", code=ExitCode.USAGE).stderr
    assert "--at-once 10000: 10000 cells need about" in refusal
    assert not (tmp_path / "run").exists()


def test_a_wrong_cell_ends_the_command_before_any_runs(tmp_path: Path) -> None:
    words = (*GRID, "--objective", "grpoo", "--out", tmp_path / "run")
    refusal = ablate(*words, code=ExitCode.USAGE).stderr
    assert "cell bf16-bf16.grpoo.seed-0" in refusal
    assert not (tmp_path / "run").exists()


def test_a_grid_in_which_nothing_varies_is_refused(tmp_path: Path) -> None:
    refusal = ablate("--model", "demo", "--out", tmp_path / "run", code=ExitCode.USAGE).stderr
    assert "nothing varies in the grid" in refusal
    assert len(refusal.strip().splitlines()) == 1


def test_a_dry_run_starts_nothing_and_gives_a_time_for_every_variant(complete_run: Path, tmp_path: Path) -> None:
    forecast = json.loads(ablate(*GRID, "--out", tmp_path / "run", "--dry-run", "--json").stdout)
    assert [variant["cells"] for variant in forecast["variants"]] == [1, 1]
    assert 0 < forecast["total"]["low_seconds"] < forecast["total"]["high_seconds"]
    assert not (tmp_path / "run").exists()
    remaining = json.loads(ablate("--resume", "--out", complete_run, "--dry-run", "--json").stdout)
    assert [(variant["cells"], variant["measured"]) for variant in remaining["variants"]] == [(0, True), (0, True)]
    assert remaining["total"]["likely_seconds"] == 0
