"""Ctrl-C anywhere, and any number of them, is one sentence and 130."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.__main__ import run
from mismatch_probe.cli import commands
from mismatch_probe.cli import process as cli_process
from mismatch_probe.errors import ExitCode
from tests.cli.test_bad_input import assert_refused
from tests.command_line import probe
from tests.halts import wait_until
from tests.processes import descendants, ended
from tests.simulated_run import Simulation, simulated_run
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _heed_interrupts() -> Iterator[None]:
    """A shell's background jobs are started deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["report", "RUN"], "mismatch_probe.report.page.write_report"),
        (["gate", "RUN", "--config", "GATE"], "mismatch_probe.cli.gate_answers.run_gate"),
        (["gate", "calibrate", "RUN", "--config", "GATE"], "mismatch_probe.gate.config.load_gate"),
        (["diff", "RUN", "RUN"], "mismatch_probe.difference.runs.difference_of"),
        (["doctor"], "mismatch_probe.compare.examination.examine"),
        (["compare", "--model", "demo", "--out", "NEW"], "mismatch_probe.compare.preparation.prepare"),
    ],
)
def test_an_interrupt_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], place: str
) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    given = {"RUN": run.path, "GATE": tmp_path / "gate.toml", "NEW": tmp_path / "new"}

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    module, _, name = place.rpartition(".")
    monkeypatch.setattr(import_module(module), name, interrupted)
    answer = probe(*(given.get(word, word) for word in words))
    assert_refused(answer, "mismatch-probe: interrupted", ExitCode.INTERRUPTED)
    assert not (tmp_path / "new").exists()


def test_what_goes_on_from_an_interrupted_gate_is_judged_by_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mismatch_probe.compare.run.execute", interrupted)
    gate, run = tmp_path / "gate.toml", tmp_path / "run"
    gate.write_text('[gate]\npreset = "nemo-rl"\n')
    model = make_checkpoint(tmp_path / "model")
    answer = probe("compare", "--model", model, "--gate", gate, "--without-baseline", "--out", run)
    assert answer.returncode == ExitCode.INTERRUPTED
    assert f"compare --resume --out {run} --gate {gate} --without-baseline\n" in answer.stderr


_SAYS_WHEN_IT_HEEDS = """
from mismatch_probe import __main__ as program
heed = program.heed_interrupts
program.heed_interrupts = lambda: (heed(), print(end=">", flush=True))
program.main()
"""


@pytest.mark.parametrize("wait_seconds", [0.0, 0.02, 0.1, 0.3, 0.6])
def test_any_number_of_interrupts_is_one_sentence(tmp_path: Path, wait_seconds: float) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    words = [sys.executable, "-c", _SAYS_WHEN_IT_HEEDS, "report", str(run.path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == ">"
        time.sleep(wait_seconds)
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        output = process.stderr.read()
    assert process.returncode in (ExitCode.INTERRUPTED, ExitCode.PASS)
    assert "Traceback" not in output
    assert "Exception ignored" not in output
    sentences = [line for line in output.splitlines() if line.startswith("mismatch-probe:")]
    assert sentences == ["mismatch-probe: interrupted"] * (process.returncode == ExitCode.INTERRUPTED)


def rendering() -> list[int]:
    """The processes that render a template for jobs of this process's servers: their memory is limited."""
    return list(filter(has_limited_memory, descendants(os.getpid())))


def has_limited_memory(pid: int) -> bool:
    try:
        limits = Path(f"/proc/{pid}/limits").read_text()
    except OSError:
        return False
    [line] = [line for line in limits.splitlines() if line.startswith("Max address space")]
    return "unlimited" not in line.split()[3]


def test_an_interrupt_while_a_chat_template_runs_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    (checkpoint / "chat_template.jinja").write_text(3 * "{% for _ in range(99999) %}" + 3 * "{% endfor %}")
    pids: list[int] = []

    def press_three_times() -> None:
        wait_until(lambda: pids.extend(rendering()) or pids, "a template is rendered")
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(cli_process, "_heeding", cli_process._Heeding())
    cli_process.heed_interrupts()
    pressing = threading.Thread(target=press_three_times, daemon=True)
    pressing.start()
    answer = probe("compare", "--model", checkpoint, "--out", tmp_path / "run")
    pressing.join()
    assert (answer.returncode, answer.stderr) == (ExitCode.INTERRUPTED, "mismatch-probe: interrupted\n")
    assert ended(pids)


HEEDED = """
import signal, sys, time, weakref
from mismatch_probe.cli.process import heed_interrupts
heed_interrupts()
class Thing: pass
thing = Thing()
kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    while True: time.sleep(0.01)
except KeyboardInterrupt:
    try:
        for _ in range(50): signal.raise_signal(signal.SIGINT)
        print("cleaned up")
    except KeyboardInterrupt:
        print("disturbed")
"""


def test_an_interrupt_that_reaches_a_finaliser_comes_again_and_those_after_it_do_not_disturb_the_end() -> None:
    ended = subprocess.run([sys.executable, "-c", HEEDED], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.stdout, ended.stderr) == ("cleaned up\n", "")


WAITS_AT_ITS_END = """
import time
from mismatch_probe import __main__ as program
from mismatch_probe.cli import commands
def invoke(words):
    try:
        print(end=">", flush=True)
        while True: time.sleep(0.01)
    finally:
        time.sleep(120)
commands.invoke = invoke
program.main()
"""


def test_ctrl_c_is_answered_at_once_and_a_second_one_ends_at_once() -> None:
    words = [sys.executable, "-c", WAITS_AT_ITS_END, "compare"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == ">"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        assert (
            process.stderr.readline() == "Interrupted: ending what runs. Ctrl-C again, after a second, ends at once.\n"
        )
        time.sleep(max(0.0, cli_process._SECOND_PRESS_SECONDS + 0.1 - (time.monotonic() - pressed)))
        assert process.poll() is None, "one that came with the first is not the second"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == ExitCode.INTERRUPTED
        assert process.stderr.read() == "mismatch-probe: interrupted\n"


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0), ("-1", 1)])
def test_one_rank_of_a_machine_answers_ctrl_c(rank: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    written: list[str] = []
    heeding = cli_process._Heeding()
    monkeypatch.setattr(heeding, "_write", written.append)
    with pytest.raises(KeyboardInterrupt):
        heeding.interrupt(signal.SIGINT, None)
    time.sleep(2 * cli_process._ANSWER_SECONDS)
    assert len(written) == lines


SLOW_TO_FREE = """
import atexit, signal, time
from mismatch_probe import __main__ as program
from mismatch_probe.cli import commands
class Large:
    def __del__(self, sleep=time.sleep): sleep(600)
large = Large()
atexit.register(print, "jobs ended")
commands.invoke = lambda words: signal.raise_signal(signal.SIGINT)
program.main()
"""


def test_an_interrupted_command_ends_its_jobs_and_does_not_wait_for_python_to_free_what_it_holds() -> None:
    words = [sys.executable, "-c", SLOW_TO_FREE, "compare"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == ExitCode.INTERRUPTED
    assert (ended.stdout, ended.stderr) == ("jobs ended\n", "mismatch-probe: interrupted\n")


def test_a_process_that_was_started_deaf_stays_so() -> None:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from mismatch_probe.cli.process import heed_interrupts, interrupts_kept\n"
        "heed_interrupts()\n"
        "with interrupts_kept(): signal.raise_signal(signal.SIGINT)\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    heeding = code.replace("signal.SIG_IGN)\n", "signal.default_int_handler)\n", 1)
    ended = subprocess.run([sys.executable, "-c", heeding], capture_output=True, text=True, check=False, timeout=60)
    assert "KeyboardInterrupt" in ended.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_request_to_end_is_a_sentence_with_a_code_of_its_own(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    program = (
        "import signal, sys\n"
        "from mismatch_probe import __main__ as program\n"
        "from mismatch_probe.report import page\n"
        f"page.write_report = lambda *_, **__: signal.raise_signal({int(number)})\n"
        "program.main()\n"
    )
    words = [sys.executable, "-c", program, "report", str(run.path)]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (code, f"mismatch-probe: ended by {number.name}\n")


def test_an_error_that_a_library_makes_of_an_interrupt_is_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy says of one that it cannot tell an object's shape."""
    heeding = cli_process._Heeding()
    monkeypatch.setattr(cli_process, "_heeding", heeding)

    def invoke(words: list[str]) -> ExitCode:
        try:
            heeding.interrupt(signal.SIGTERM, None)
        except KeyboardInterrupt as interrupt:
            raise ValueError("could not determine the shape of object type") from interrupt
        return ExitCode.PASS

    monkeypatch.setattr(commands, "invoke", invoke)
    assert run(["headroom"]) == ExitCode.TERMINATED
