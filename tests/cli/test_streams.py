"""Streams that are closed, full or deserted: the true code, or 4 where what was asked for could not be delivered."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import Answer
from tests.gate.cli import GATE, check, gate_file
from tests.light_python import LightPython
from tests.simulated_run import Simulation, simulated_run

PROBE = f"{sys.executable} -m mismatch_probe"
GOOD = check(metric="abs_logprob_diff", max=1)
BAD = check(metric="abs_logprob_diff", max=1e-9)
Stream = Callable[[], AbstractContextManager[int | None]]
Words = Callable[[str, dict[int, Stream]], Answer]


@contextmanager
def full() -> Iterator[int]:
    with Path("/dev/full").open("w") as stream:
        yield stream.fileno()


@contextmanager
def deserted() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@contextmanager
def closed() -> Iterator[None]:
    yield None


TO_NOBODY = {"closed": closed, "full": full, "deserted": deserted}
FROM_NOBODY = {"closed": closed, "full": full}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(
        tmp_path_factory.mktemp("streams") / "run", Simulation(num_prompts=32, mean_length=20), with_summary=True
    ).path


@pytest.fixture(scope="module")
def light_python() -> Iterator[LightPython]:
    python = LightPython()
    yield python
    python.close()


@pytest.fixture
def probe(light_python: LightPython, tmp_path: Path) -> Words:
    """`mismatch-probe WORDS` in the test's folder; the streams of `nobody`, by their number, are what they yield."""

    def run(words: str, nobody: dict[int, Stream]) -> Answer:
        with ExitStack() as stack:
            streams: dict[int, int | None] = {0: stack.enter_context(Path(os.devnull).open()).fileno()}
            kept = {number: stack.enter_context(TemporaryFile("w+")) for number in (1, 2)}
            streams |= {number: file.fileno() for number, file in kept.items()}
            streams |= {number: stack.enter_context(stream()) for number, stream in nobody.items()}
            there = {number: stream for number, stream in streams.items() if stream is not None}
            code = light_python.run(words.split(), tmp_path, there)
            return Answer(code, *(_content(file) for file in kept.values()))

    return run


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@pytest.mark.slow
@pytest.mark.parametrize("stream", TO_NOBODY.values(), ids=TO_NOBODY)
@pytest.mark.parametrize(("checks", "code"), [(GOOD, 0), (BAD, 1)], ids=["pass", "fail"])
def test_a_gate_ends_with_its_answer_where_nobody_reads_what_people_read(
    run: Path, tmp_path: Path, probe: Words, stream: Stream, checks: str, code: int
) -> None:
    gate_file(tmp_path, GATE + checks)
    assert probe(f"gate {run}", {2: stream}).returncode == code
    assert (run / "gate.json").is_file()


@pytest.mark.parametrize("stream", TO_NOBODY.values(), ids=TO_NOBODY)
@pytest.mark.parametrize(
    ("words", "code"),
    [("report RUN", 0), ("--bogus", 2), ("compare --dtype bf16 --train-dtype fp16 --debug", 2)],
)
def test_every_command_ends_with_its_own_code(run: Path, probe: Words, words: str, code: int, stream: Stream) -> None:
    assert probe(words.replace("RUN", str(run)), {2: stream}).returncode == code


@pytest.mark.parametrize("stream", FROM_NOBODY.values(), ids=FROM_NOBODY)
@pytest.mark.parametrize("words", ["schema gate", "--help", "--version", "gate RUN --json", "report RUN --json"])
def test_what_was_asked_for_and_cannot_be_delivered_is_a_sentence(
    run: Path, tmp_path: Path, probe: Words, words: str, stream: Stream
) -> None:
    gate_file(tmp_path, GATE + GOOD)
    ended = probe(words.replace("RUN", str(run)), {1: stream})
    assert ended.returncode == ExitCode.ENVIRONMENT
    [said] = [line for line in ended.stderr.splitlines() if line.startswith("mismatch-probe:")]
    assert "standard output could not be written" in said
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "started"])
def test_everything_closed_is_the_true_code_and_no_file_takes_the_place_of_a_stream(
    run: Path, tmp_path: Path, probe: Words, forked: bool
) -> None:
    gate_file(tmp_path, GATE + GOOD)
    words = f"gate {run} --junit junit.xml"
    if forked:
        code = probe(words, dict.fromkeys((0, 1, 2), closed)).returncode
    else:
        code = subprocess.run(["bash", "-c", f"{PROBE} {words} <&- >&- 2>&-"], cwd=tmp_path, check=False).returncode
    assert code == 0
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
