"""The page of a sanity test says whether it is passed, and why not."""

import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.config.model import SanitySettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.training_run import TOO_FEW_STEPS, SanityDirectory, SanityRecord, Solved
from mismatch_probe.report.training.page import write_training_report
from mismatch_probe.stats.results import Estimate
from tests.command_line import probe
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import assert_acts_not
from tests.report.training.training_runs import TrainingSample, training_run

SOLVED = Estimate(0.821, 0.79, 0.85, 0.95, 40, 1600, "sequence")


def page_of(folder: Path, **changes: Any) -> str:
    run = training_run(folder / "run", TrainingSample(steps=6))
    record = SanityRecord(
        settings=SanitySettings(),
        rates={f"p{number}": 0.5 for number in range(90)},
        kept=["p1", "p2"],
        latest={name: Solved(step=60, responses=8, solved=6, tokens=300) for name in ("p1", "p2")},
        step=60,
    )
    SanityDirectory(run.path).write_sanity(record.model_copy(update=changes))
    write_training_report([run], run.report_path)
    return run.report_path.read_text(encoding="utf-8")


def top(page: str) -> str:
    header = re.sub(r'<span class="whole">(.*?)</span>', r"\1", page[page.index("<header") : page.index("</header>")])
    text = re.sub(r"<[^>]+>", " ", header)
    return re.sub(r"\s+", " ", text)


def test_a_failed_test_says_failed_and_why_although_its_training_finished(tmp_path: Path) -> None:
    text = top(page_of(tmp_path, passed=False, verdict="not passed: all 60 steps are done", accuracy=SOLVED))
    assert text.startswith(" ✕ failed Sanity test of demo Sanity test failed: all 60 steps are done.")
    assert "82.1 % [79.0 %, 85.0 %] of the latest responses to 2 problems solved." in text
    assert "79.0 % to 85.0 %; more than 95 % passes" in text
    assert "finished" not in text


def test_a_passed_test_says_passed(tmp_path: Path) -> None:
    text = top(page_of(tmp_path, passed=True, verdict="passed at step 60", accuracy=SOLVED))
    assert text.startswith(" ✓ passed Sanity test of demo Sanity test passed at step 60.")
    assert "failed" not in text


def test_a_test_that_goes_on_is_unfinished(tmp_path: Path) -> None:
    text = top(page_of(tmp_path, kept=None, latest={}))
    assert text.startswith(" ? unfinished Sanity test of demo Sanity test unfinished. Not every problem was seen.")


@pytest.mark.slow
def test_the_terminal_says_whether_it_is_passed_before_how_training_ended(tmp_path: Path) -> None:
    page_of(tmp_path, passed=False, verdict="not passed: all 60 steps are done", accuracy=SOLVED)
    output = probe("report", tmp_path / "run", code=ExitCode.PASS).stdout
    assert output.startswith(
        "Sanity test failed: all 60 steps are done. 82.1 % [79.0 %, 85.0 %] of the latest responses to 2 problems "
        "solved.\nMore than 95 % passes.\n"
    )
    assert output.index("Finished ") > output.index("More than 95 %")


@pytest.mark.parametrize(
    ("passed", "verdict", "step"),
    [
        (True, "passed at step 60", "Train on"),
        (None, "unfinished", "Go on"),
        (False, f"not passed: 60 steps were {TOO_FEW_STEPS}", "More steps"),
        (False, "not passed: guard update-size stopped it", "Fix and repeat"),
    ],
)
def test_the_next_step_is_that_of_the_answer(tmp_path: Path, passed: bool | None, verdict: str, step: str) -> None:
    assert f"Next step {step} after step 60" in top(page_of(tmp_path, passed=passed, verdict=verdict, accuracy=SOLVED))


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_verdict_that_a_stranger_wrote_is_text(tmp_path: Path, payload: str) -> None:
    assert_acts_not(page_of(tmp_path, passed=False, verdict=payload.encode(errors="ignore").decode()))
