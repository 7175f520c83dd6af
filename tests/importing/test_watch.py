"""`watch`: each step of a log is judged once, by the guards of `train`."""

import re
import signal
import subprocess
import sys
import warnings
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mismatch_probe.causes.training import EndCause
from mismatch_probe.cli.watch_course import WatchCourse
from mismatch_probe.errors import ExitCode
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.importing.following import Follower
from mismatch_probe.importing.watch_outcome import Patience, Tally
from mismatch_probe.importing.watching import Watch
from mismatch_probe.logs import recognise
from mismatch_probe.notation import write_number
from mismatch_probe.records.lines import WatchRecord
from tests.command_line import probe
from tests.importing.logs import mean_abs, row, write
from tests.importing.watching import ENTROPIES, LIMIT, log_of, old, step_rows, watched
from tests.logs.choices import rows_of, with_experts


@pytest.mark.slow
def test_a_steady_log_is_judged_step_by_step_and_passes(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0] * 5))
    _, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert [step.step for step in record.steps] == [0, 1, 2, 3, 4]
    assert record.steps[0].metrics["mismatch/abs_logprob_diff"] == pytest.approx(mean_abs(step_rows()), rel=1e-12)
    assert record.stopped_at is None


@pytest.mark.slow
def test_a_guard_that_asks_to_stop_ends_it_with_1_at_the_step_that_broke_it(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert record.stopped_at == 5
    assert [event["actions"] for step in record.steps for event in step.events] == [["warn"], ["stop"]]
    assert "asks to stop at step 5" in answer.stderr


@pytest.mark.slow
def test_a_guard_that_asks_for_a_rollback_is_no_pass(folder: Path, guards: Path) -> None:
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["rollback", "warn"]'))
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 1.0, 1.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert len(record.steps) == 6
    assert record.stopped_at is None
    sentence = "fail: guards asked for more than a warning: go back to the last good checkpoint at step 3 (mismatch)"
    assert f"{sentence}; judged 6 of 6 steps" in answer.stderr


@pytest.mark.slow
def test_a_guard_that_only_warns_is_a_pass(folder: Path, guards: Path) -> None:
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["warn"]'))
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0, 1.0, 1.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert [step.step for step in record.steps if step.events] == [3]
    assert "pass: no guard asked for more than a warning (mismatch fired), and KL (k3) was neither" in answer.stderr
    assert answer.stderr.endswith("; judged 6 of 6 steps\n")


def test_guards_that_the_log_cannot_serve_are_off_and_counted_in_one_line(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    answer, record = watched(folder, code=ExitCode.PASS)
    assert record.guards_off["temperature"] == ["mismatch/temperature_fit"]
    assert "mismatch-limit" not in record.guards_off
    [counted] = [line for line in answer.stderr.splitlines() if "guards judge this log" in line]
    on, of = (int(word) for word in counted.split()[:3] if word.isdigit())
    assert of - on == len(record.guards_off) > 10
    by_what = [int(number) for number in re.findall(r"\((\d+)\)", counted)]
    assert sum(by_what) == len(record.guards_off)
    assert "entropies (4)" in counted


def test_no_guard_is_counted_where_the_log_serves_all(folder: Path, guards: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    answer, _ = watched(folder, "--guards", guards, code=ExitCode.PASS)
    assert "guards judge this log" not in answer.stderr


def test_with_entropies_in_the_log_more_guards_are_on(folder: Path) -> None:
    for number in range(2):
        write(folder / f"step_{number}.jsonl", step_rows(entropy=ENTROPIES))
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert "temperature" not in record.guards_off


def test_entropies_that_were_not_recorded_turn_no_guard_on(folder: Path) -> None:
    for number in range(2):
        write(folder / f"step_{number}.jsonl", step_rows(entropy=[0.0] * 30))
    old(folder)
    _, record = watched(folder, code=ExitCode.PASS)
    assert "temperature" in record.guards_off
    assert "policy/entropy" not in record.steps[0].metrics


def in_bits(widest: float) -> list[dict[str, Any]]:
    """64 responses of 30 tokens drawn from 100 by logits of a spread up to `widest`; both sides in bits."""
    random = np.random.default_rng(5)
    logits = random.normal(size=(64 * 30, 100)) * random.uniform(0.5, widest, (64 * 30, 1))
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    drawn = (log_p + random.gumbel(size=log_p.shape)).argmax(axis=1)
    log_mu = log_p[np.arange(drawn.size), drawn] / np.log(2)
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)
    log_pi = log_mu * (1 + 1e-3 * random.normal(size=log_mu.size))
    sides = {"logprobs": log_mu, "train_logprobs": np.minimum(log_pi, 0), "entropy": entropy}
    return [
        row(number) | {name: values.reshape(64, 30)[number].tolist() for name, values in sides.items()}
        for number in range(64)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("widest", "findings"), [(3.0, []), (10.0, ["other_base"])])
def test_entropies_that_are_not_used_are_noted_once_in_plain_words(
    folder: Path, widest: float, findings: list[str]
) -> None:
    """The checks of a log, which add up, need tokens of entropies below 0.5 as well."""
    for number in range(3):
        write(folder / f"step_{number}.jsonl", in_bits(widest))
    old(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer, record = watched(folder, code=ExitCode.PASS)
    assert record.steps[2].findings == findings
    assert answer.stderr.count("  note: its entropies are not used") == 1
    assert answer.stderr.count("write natural ones") == 3 * len(findings)
    assert "UserWarning" not in answer.stderr
    assert "log_pi" not in answer.stderr


def test_entropies_that_are_used_are_not_noted(folder: Path) -> None:
    for number in range(2):
        write(folder / f"step_{number}.jsonl", step_rows(entropy=ENTROPIES))
    old(folder)
    answer, _ = watched(folder, code=ExitCode.PASS)
    assert "note:" not in answer.stderr


def test_copies_among_the_responses_of_a_step_make_it_no_better_and_are_named(folder: Path) -> None:
    for number in range(2):
        steps = [row(index) for index in range(40)]
        steps[5] |= {"train_logprobs": steps[5]["logprobs"]}
        write(folder / f"step_{number}.jsonl", steps)
    old(folder)
    answer, record = watched(folder, code=ExitCode.PASS)
    step = record.steps[0]
    assert step.metrics["mismatch/abs_logprob_diff"] == pytest.approx(mean_abs([*steps[:5], *steps[6:]]), rel=1e-12)
    assert step.metrics["mismatch/copied_rows_share"] == 1 / 40
    assert step.findings == ["copied_rows"]
    assert "no guard asked for more than a warning (copied-rows fired)" in answer.stderr


def test_a_step_of_which_many_responses_are_copies_is_not_judged(folder: Path, guards: Path) -> None:
    """As one whose tokens lack a log-prob for any other reason."""
    steps = step_rows()
    for number in range(2):
        copied = [one | {"train_logprobs": one["logprobs"]} for one in steps[::4]]
        write(folder / f"step_{number}.jsonl", [*copied, *(one for index, one in enumerate(steps) if index % 4)])
    old(folder)
    answer, record = watched(folder, "--guards", guards, code=ExitCode.INCONCLUSIVE)
    assert [step.findings for step in record.steps] == [["copied_rows"]] * 2
    assert not any(step.metrics for step in record.steps)
    assert "120 of 480 tokens (25 %" in answer.stderr


@pytest.mark.parametrize("words", [(), ("--format", "plain")])
def test_a_folder_that_does_not_exist_ends_with_2(folder: Path, words: tuple[str, ...]) -> None:
    answer = probe("watch", folder / "none", "--every", 0.1, *words, code=ExitCode.USAGE)
    assert "there is no log" in answer.stderr


def test_a_file_with_other_steps_than_its_name_says_is_not_judged_as_one(folder: Path) -> None:
    write(folder / "part-00000.jsonl", [*step_rows(step=5), *step_rows(50.0, step=6)])
    old(folder)
    answer = probe("watch", folder, "--idle", 0, code=ExitCode.USAGE)
    assert "is of step 5 in a file of step 0" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_judged_is_on_stdout_when_it_is_interrupted(
    folder: Path, guards: Path, number: int, code: ExitCode
) -> None:
    old(log_of(folder, [1.0, 1.0]))
    words = ["watch", str(folder), "--guards", str(guards), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 1:"):
            break
    process.send_signal(number)
    out, messages = process.communicate(timeout=60)
    assert process.returncode == code, messages
    record = WatchRecord.model_validate_json(out)
    assert [step.step for step in record.steps] == [0, 1]
    assert record.stopped_at is None


@pytest.mark.slow
def test_a_file_without_steps_is_refused_in_one_sentence_and_nothing_more_is_said(tmp_path: Path) -> None:
    log = write(tmp_path / "all.jsonl", step_rows())
    answer = probe("watch", log, "--idle", 0, code=ExitCode.USAGE)
    assert "has no step in its name" in answer.stderr
    assert answer.stdout == ""
    assert "judged 0 of 0" not in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [True, False])
def test_one_file_whose_rows_name_their_step_is_judged_step_by_step(
    tmp_path: Path, guards: Path, is_named: bool
) -> None:
    """Named itself, or its folder. Before, it was refused."""
    folder = tmp_path / "log"
    folder.mkdir()
    noises = [1.0, 1.0, 100.0, 100.0, 1.0, 1.0]
    log = write(folder / "all.jsonl", [one for step, noise in enumerate(noises) for one in step_rows(noise, step=step)])
    old(folder)
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["rollback", "warn"]'))
    answer, record = watched(log if is_named else folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    assert [(step.step, step.num_responses) for step in record.steps] == [(step, 16) for step in range(6)]
    assert (record.answer, record.exit_code) == ("fail", ExitCode.GATE_FAILED)
    assert (
        "fail: guards asked for more than a warning: go back to the last good checkpoint at step 3 (mismatch)"
        in answer.stderr
    )


def test_the_closing_lines_show_how_the_mismatch_went_and_what_to_do_next(folder: Path, guards: Path) -> None:
    guards.write_text(LIMIT.replace('["warn", "stop"]', '["rollback", "warn"]'))
    old(log_of(folder, [1.0, 1.0, 100.0, 100.0]))
    answer, record = watched(folder, "--guards", guards, code=ExitCode.GATE_FAILED)
    first, last = (write_number(float(record.steps[at].metrics["mismatch/kl_k3"])) for at in (0, -1))
    assert f"KL (k3)         {first} at step 0, {last} at step 3" in answer.stderr
    assert f"likely cause    {record.diagnosis}" in answer.stderr
    assert record.cause == EndCause.BATCH_REPEATED
    command = f"mismatch-probe import {folder} --model CHECKPOINT --step 2 --out runs/log"
    assert answer.stderr.rstrip().endswith(command)


def test_a_passing_watch_asks_for_nothing_next(folder: Path) -> None:
    old(log_of(folder, [1.0, 1.0]))
    answer, record = watched(folder, code=ExitCode.PASS)
    assert (record.answer, record.diagnosis) == ("pass", None)
    assert "Next" not in answer.stderr


def test_no_line_of_a_terminal_breaks_a_word(folder: Path) -> None:
    """Before, the terminal broke lines wherever its last column was."""
    out = StringIO()
    watch = Watch(DEFAULT_GUARDS)
    course = WatchCourse(watch, folder, Tally(Patience()))
    course.follower = follower = Follower(recognise(log_of(folder, [1.0, 100.0])), folder)
    old(folder)
    course.follow(
        map(watch.judge, follower.new_steps()), Console(file=out, width=60, force_terminal=True, color_system=None)
    )
    lines = out.getvalue().splitlines()
    assert any("guards judge this log" in line for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 30])
def test_a_guard_limits_what_of_each_step_can_be_replayed(tmp_path: Path, lost: int) -> None:
    guards = tmp_path / "guards.toml"
    guards.write_text(
        'defaults = false\n[[guard]]\nname = "replay"\nrule = "limit"\nmetric = "replay/expert_coverage"\n'
        'below = 0.99\nactions = ["warn", "stop"]\n'
    )
    folder = tmp_path / "log"
    folder.mkdir()
    for step in range(3):
        lines = rows_of(with_experts(step, responses=4))
        for line in lines:
            line["train_logprobs"] = [value - 0.001 for value in line["logprobs"]]
            for place in range(lost if step else 0):
                line["routed_experts"][11 + place] = None
        write(folder / f"step_{step}.jsonl", lines)
    old(folder)
    code = ExitCode.GATE_FAILED if lost else ExitCode.PASS
    _, record = watched(folder, "--guards", guards, code=code)
    assert record.steps[0].metrics["replay/expert_coverage"] == 1
    if lost:
        assert record.steps[1].metrics["replay/expert_coverage"] == pytest.approx(1 - lost / 60)
