"""`watch` judges how the KL goes over the steps by the steps there are, whatever its guards wait for."""

from pathlib import Path

import pytest

from mismatch_probe.causes.training import EndCause
from mismatch_probe.errors import ExitCode
from tests.importing.logs import log_of_levels
from tests.importing.watching import old, watched

pytestmark = pytest.mark.slow

GROWING = tuple(0.0003 * 2.2**step for step in range(8))
FLAT = (0.01, 0.012, 0.011, 0.013, 0.012, 0.009, 0.011, 0.012)


def test_a_kl_that_grows_below_all_limits_is_a_warning_with_a_command(folder: Path) -> None:
    """Before: "pass: no guard fired"."""
    log = log_of_levels(folder / "log one.jsonl", GROWING)
    old(folder)
    answer, record = watched(log, code=ExitCode.PASS)
    assert record.growth is not None
    assert (record.growth.first_step, record.growth.last_step) == (0, 7)
    assert not any(step.events for step in record.steps)
    assert "\npass with a warning: KL per token grew " in answer.stderr
    assert answer.stderr.count("KL per token grew ") == 3, "after 4 steps, after 8, at the end"
    command = f"mismatch-probe import '{log}' --model CHECKPOINT --step 7 --out runs/log"
    assert answer.stderr.rstrip().endswith(command)


def test_a_flat_log_is_called_flat_with_its_steps_and_level(folder: Path) -> None:
    log = log_of_levels(folder / "log.jsonl", FLAT)
    old(folder)
    answer, record = watched(log, code=ExitCode.PASS)
    assert record.growth is None
    assert "pass: no guard fired, and KL (k3) was flat over 8 steps (" in answer.stderr
    assert " of NeMo-RL's limit; judged 8 of 8 steps" in answer.stderr
    assert f"{record.num_guards - len(record.guards_off)} of {record.num_guards} guards" in answer.stderr
    assert "and a test for growth over the steps" in answer.stderr


def test_too_few_responses_to_show_a_growth_are_not_called_flat(folder: Path) -> None:
    log = log_of_levels(folder / "log.jsonl", FLAT[:3], responses=1)
    old(folder)
    answer, record = watched(log, code=ExitCode.PASS)
    assert not record.can_show_growth
    assert "growth of the KL was not judged: these are too few responses to show one" in answer.stderr
    assert "flat" not in answer.stderr


def test_a_step_that_stands_out_is_neither_flat_nor_growth(folder: Path) -> None:
    log = log_of_levels(folder / "log.jsonl", (*FLAT[:4], 0.1, *FLAT[4:]))
    old(folder)
    answer, _ = watched(log, code=ExitCode.PASS)
    assert "KL (k3) was neither flat nor growing over 9 steps (" in answer.stderr
    assert " at step 4), " in answer.stderr


def test_what_guards_saw_without_a_cause_says_since_when(folder: Path) -> None:
    """Before: "The cause is unknown"."""
    log = log_of_levels(folder / "log.jsonl", (*FLAT[:5], 0.6, 0.9, 1.2))
    old(folder)
    answer, record = watched(log, code=ExitCode.GATE_FAILED)
    assert record.diagnosis is not None
    assert record.cause == EndCause.UNEXPLAINED
    assert f"what is known   {record.diagnosis}" in answer.stderr
    assert record.diagnosis.startswith("No known cause fits. Guards saw: ")
    assert " at step 4 to " in record.diagnosis
    assert "look at what changed between these two steps" in record.diagnosis
    assert "over the steps  KL per token grew " in answer.stderr
    assert "--step 5 " in answer.stderr
