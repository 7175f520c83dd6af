"""`report` on training runs: one page a run, several runs on one page, and what it refuses."""

import json
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.training_run import TrainingSummary
from tests.cli.test_bad_input import assert_refused
from tests.cli.test_schema import validate
from tests.command_line import probe
from tests.report.training.training_runs import TrainingSample, firing, training_run
from tests.simulated_run import Simulation, simulated_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return training_run(tmp_path / "fp16", TrainingSample(firings=(firing(9, ["warn"]),))).path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return training_run(tmp_path / "bf16", TrainingSample(dtype=Dtype.BF16)).path


def test_a_training_run_gets_its_page_and_its_answer_on_the_terminal(run: Path) -> None:
    answer = probe("report", run)
    assert answer.returncode == 0
    assert "Finished 60 steps: reward from" in answer.stdout
    assert "Guard mismatch-limit fired once, first at step 9" in answer.stdout
    assert f"Report: {run / 'report.html'}" in answer.stdout
    assert "Finished 60 steps" in (run / "report.html").read_text()


@pytest.mark.slow
def test_json_is_what_came_of_the_run_and_nothing_else(run: Path) -> None:
    document = json.loads(probe("report", run, "--json").stdout)
    validate("train", document)
    found = TrainingSummary.model_validate(document)
    assert (found.outcome, found.steps, found.num_events) == ("finished", 60, 1)


@pytest.mark.slow
def test_several_runs_share_one_page(run: Path, other: Path, tmp_path: Path) -> None:
    answer = probe("report", run, other, "--out", tmp_path / "both.html")
    assert answer.returncode == 0
    assert "FP16: Finished 60 steps" in answer.stdout
    assert "KL per token of BF16 is" in (tmp_path / "both.html").read_text()
    assert not (run / "report.html").exists()


def test_several_runs_need_a_place_for_their_page(run: Path, other: Path) -> None:
    assert_refused(probe("report", run, other), "several runs make one page; name it with --out FILE")


def test_json_is_of_one_run(run: Path, other: Path, tmp_path: Path) -> None:
    assert_refused(
        probe("report", run, other, "--out", tmp_path / "x.html", "--json"), "--json prints the result of one"
    )


def test_a_comparison_shares_no_page(run: Path, tmp_path: Path) -> None:
    comparison = simulated_run(tmp_path / "compared", Simulation(num_prompts=8)).path
    out = tmp_path / "x.html"
    assert_refused(
        probe("report", run, comparison, "--out", out), "compared is no training run, and only training runs"
    )
    assert_refused(probe("report", comparison, comparison, "--out", out), "only training runs share a page")
    assert_refused(probe("report", comparison, "--out", out), "only training runs share a page or go to --out")


def test_a_training_run_has_nothing_to_recompute(run: Path) -> None:
    assert_refused(probe("report", run, "--recompute"), "--recompute is for comparisons")
