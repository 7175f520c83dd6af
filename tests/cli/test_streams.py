"""Streams that are closed, full or deserted: the true code, or 4 where what was asked for could not be delivered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from tests.gate.cli import GATE, check, gate_file
from tests.simulated_run import Simulation, simulated_run

PROBE = f"{sys.executable} -m mismatch_probe"
GOOD = check(metric="abs_logprob_diff", max=1)
BAD = check(metric="abs_logprob_diff", max=1e-9)
TO_NOBODY = {"closed": "2>&-", "full": "2>/dev/full", "deserted": "2> >(exec 0<&-; exec sleep 2)"}
FROM_NOBODY = {"closed": ">&-", "full": ">/dev/full"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(
        tmp_path_factory.mktemp("streams") / "run", Simulation(num_prompts=256), with_summary=True
    ).path


def shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("stream", TO_NOBODY.values(), ids=TO_NOBODY)
@pytest.mark.parametrize(("checks", "code"), [(GOOD, 0), (BAD, 1)], ids=["pass", "fail"])
def test_a_gate_ends_with_its_answer_where_nobody_reads_what_people_read(
    run: Path, tmp_path: Path, stream: str, checks: str, code: int
) -> None:
    gate_file(tmp_path, GATE + checks)
    ended = shell(f"{PROBE} gate {run} {stream}", tmp_path)
    assert ended.returncode == code, ended.stderr
    assert (run / "gate.json").is_file()


@pytest.mark.parametrize("stream", TO_NOBODY.values(), ids=TO_NOBODY)
@pytest.mark.parametrize(
    ("words", "code"),
    [("report RUN", 0), ("--bogus", 2), ("compare --dtype bf16 --train-dtype fp16 --debug", 2)],
)
def test_every_command_ends_with_its_own_code(run: Path, tmp_path: Path, words: str, code: int, stream: str) -> None:
    ended = shell(f"{PROBE} {words.replace('RUN', str(run))} {stream}", tmp_path)
    assert ended.returncode == code, ended.stderr


@pytest.mark.parametrize("stream", FROM_NOBODY.values(), ids=FROM_NOBODY)
@pytest.mark.parametrize("words", ["schema gate", "--help", "--version", "gate RUN --json", "report RUN --json"])
def test_what_was_asked_for_and_cannot_be_delivered_is_a_sentence(
    run: Path, tmp_path: Path, words: str, stream: str
) -> None:
    gate_file(tmp_path, GATE + GOOD)
    ended = shell(f"{PROBE} {words.replace('RUN', str(run))} {stream}", tmp_path)
    assert ended.returncode == ExitCode.ENVIRONMENT
    [said] = [line for line in ended.stderr.splitlines() if line.startswith("mismatch-probe:")]
    assert "standard output could not be written" in said
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_a_reader_of_a_document_that_goes_away_is_no_failed_gate(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mismatch_probe", "report", str(run), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == ExitCode.ENVIRONMENT
    assert "standard output was closed" in said
    assert "Exception ignored" not in said


def test_everything_closed_is_the_true_code_and_no_file_takes_the_place_of_a_stream(run: Path, tmp_path: Path) -> None:
    gate_file(tmp_path, GATE + GOOD)
    ended = shell(f"{PROBE} gate {run} --junit junit.xml <&- >&- 2>&-", tmp_path)
    assert ended.returncode == 0
    assert (tmp_path / "junit.xml").read_text().startswith("<testsuites")


def test_a_descriptor_that_no_stream_has_is_what_the_next_file_would_get() -> None:
    """What the streams guard against: without them a library's message ends in a file."""
    code = "import os; print(os.open(os.devnull, os.O_RDONLY), file=open(3, 'w'))"
    reading, writing = os.pipe()
    words = f'{sys.executable} -c "{code}" 2>&- 3>&{writing}'
    subprocess.run(["bash", "-c", words], pass_fds=(writing,), check=True)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.read() == "2\n"
