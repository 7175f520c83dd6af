"""Streams that are closed, full or deserted: the true code, or 4 where what was asked for could not be delivered."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from mismatch_probe.cli.output import PeopleConsole
from mismatch_probe.errors import ExitCode
from mismatch_probe.report.screen import print_line, print_terms
from tests.command_line import Answer
from tests.gate.cli import GATE, check, gate_file
from tests.light_python import LightPython
from tests.simulated_run import Simulation, simulated_run

pytestmark = pytest.mark.slow

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
    [message] = [line for line in ended.stderr.splitlines() if line.startswith("mismatch-probe:")]
    assert "standard output could not be written" in message
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


JUDGED = [(words, checks, code) for words in ("gate RUN", "gate RUN --json") for checks, code in ((GOOD, 0), (BAD, 1))]
TOLD = [(words, GOOD, 0) for words in ("schema gate", "--help", "report RUN", "diff RUN RUN", "init")]


@pytest.mark.parametrize(("words", "checks", "code"), [*JUDGED, *TOLD])
def test_a_reader_that_goes_away_has_read_enough(
    run: Path, tmp_path: Path, probe: Words, words: str, checks: str, code: int
) -> None:
    """`| head -1`: no word on stderr, and the command's own code."""
    gate_file(tmp_path, GATE + checks)
    ended = probe(words.replace("RUN", str(run)), {1: deserted})
    assert ended.returncode == code
    if "--json" not in words:
        assert ended.stderr == ""
    assert (run / "gate.json").is_file() or not words.startswith("gate")


@pytest.mark.parametrize("words", ["gate RUN", "report RUN", "diff RUN RUN"])
def test_a_table_that_a_full_disk_does_not_take_is_a_sentence(
    run: Path, tmp_path: Path, probe: Words, words: str
) -> None:
    gate_file(tmp_path, GATE + GOOD)
    ended = probe(words.replace("RUN", str(run)), {1: full})
    assert ended.returncode == ExitCode.ENVIRONMENT
    assert ended.stderr.startswith("mismatch-probe: what was asked for on standard output could not be written")


@pytest.mark.parametrize("words", ["gate RUN", "report RUN", "diff RUN RUN"])
def test_without_a_standard_output_the_result_is_on_stderr(run: Path, tmp_path: Path, probe: Words, words: str) -> None:
    gate_file(tmp_path, GATE + GOOD)
    words = words.replace("RUN", str(run))
    wanted, ended = probe(words, {}), probe(words, {1: closed})
    assert (wanted.returncode, wanted.stderr) == (0, "")
    assert (ended.returncode, ended.stderr) == (0, wanted.stdout)


@pytest.mark.parametrize("words", ["gate RUN", "report RUN", "diff RUN RUN"])
def test_a_result_is_on_standard_output_whole_and_without_colours_and_beside_a_document_on_stderr(
    run: Path, tmp_path: Path, probe: Words, words: str
) -> None:
    gate_file(tmp_path, GATE + GOOD)
    words = words.replace("RUN", str(run))
    people, programs = probe(words, {}), probe(f"{words} --json", {})
    assert (people.stderr, people.stdout) == ("", programs.stderr)
    assert max(map(len, people.stdout.splitlines())) > 80, "nothing is folded where no terminal is"
    assert "\x1b" not in people.stdout
    assert isinstance(json.loads(programs.stdout), dict)


def test_a_line_longer_than_the_terminal_loses_nothing() -> None:
    """What rich wraps has line ends of rich's own, which are not spelt out as a stranger's are."""
    sentence = "a sentence of many words " * 8
    file = io.StringIO()
    console = PeopleConsole(file)
    console._force_terminal, console.width = True, 80
    print_line(console, sentence)
    print_terms(console, [("name", sentence)])
    assert file.getvalue().count("sentence") == 16
    folded = [line for line in file.getvalue().splitlines() if line.startswith("      ")]
    assert len(folded) == 2, "the rest of what is folded stands below it"


def test_a_failure_on_a_terminal_breaks_at_blanks_and_in_a_pipe_not_at_all(tmp_path: Path) -> None:
    missing = tmp_path / ("a" * 70) / "log.jsonl"
    words = [sys.executable, "-m", "mismatch_probe", "report", str(missing)]
    people, terminal = pty.openpty()
    ended = subprocess.run(words, stderr=terminal, env={**os.environ, "COLUMNS": "40"}, check=False)
    os.close(terminal)
    on_terminal = os.read(people, 2**16).decode().splitlines()
    os.close(people)
    piped = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, piped.returncode) == (ExitCode.USAGE, ExitCode.USAGE)
    [sentence] = piped.stderr.splitlines()
    assert " ".join(on_terminal) == sentence
    assert len(on_terminal) > 2
    assert [line for line in on_terminal if len(line) > 40] == [line for line in on_terminal if str(missing) in line]


def test_a_pipe_that_is_closed_ends_quietly(run: Path) -> None:
    words = f"set -o pipefail; {PROBE} diff {run} {run} | head -1"
    ended = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("BF16: no difference can be seen")


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
    with os.fdopen(reading) as message:
        assert message.read() == "2\n"
