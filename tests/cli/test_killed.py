"""A command that is killed, terminated or hung up leaves no process, no scratch folder and no shared memory."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from mismatch_probe.errors import ExitCode
from tests.command_line import probe
from tests.cores import take_every_core
from tests.forks import FORKS
from tests.halts import PATIENCE_SECONDS
from tests.importing.logs import rows, write
from tests.processes import ENDING_SECONDS, processes_of
from tests.simulated_run import Simulation, simulated_run
from tests.warm_python import WarmProcess, warm_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found by their environment"),
]

CODES = {
    signal.SIGKILL: -signal.SIGKILL,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HUNG_UP,
}
EVERY = tuple(CODES)
MARK = "MISMATCH_PROBE_TEST_MARK"
SMALL = ("--model", "demo", "--max-new-tokens", "16")
COMPARE = ("compare", *SMALL, "--num-prompts", "4", "--dtype", "bf16", "--out", "out")
ASKED, HUNG_UP = (signal.SIGKILL, signal.SIGTERM), (signal.SIGKILL, signal.SIGHUP)
TWO_RANKS = ("--vllm.tensor_parallel_size", "2")


@dataclass(frozen=True)
class Command:
    """What is run, and the file that says it is at work; without one it is killed while it imports.

    shares_memory: it is at work once its processes share memory under a name. signals: to send, one in each run.
    SIGTERM and SIGHUP are heeded alike but for the exit code: of commands that start an engine each gets one of the
    two. imports: at which of them it and its servers are interpreters, which import; at others forks that have
    imported all. spawns: at which of them an engine's own processes are interpreters too, and at work
    late: these signals come last.
    """

    words: tuple[str, ...]
    at_work: str | None = None
    shares_memory: bool = False
    signals: tuple[signal.Signals, ...] = EVERY
    imports: tuple[signal.Signals, ...] = ()
    spawns: tuple[signal.Signals, ...] = ()


COMMANDS = {
    "compare": Command(COMPARE, "**/engine-*.log", signals=ASKED, imports=(signal.SIGKILL,)),
    "compare-on-two-ranks": Command(
        (*COMPARE, *TWO_RANKS), "**/engine-*.log", shares_memory=True, signals=HUNG_UP[::-1], spawns=(signal.SIGKILL,)
    ),
    "localize": Command(
        ("localize", *SMALL, "--num-prompts", "4", "--out", "out.json"), "**/engine.log", signals=ASKED
    ),
    "evaluate": Command(("evaluate", *SMALL, "--dtype", "bf16", "--out", "out"), "out/logs/*.log", signals=HUNG_UP),
    "headroom": Command(("headroom", "--model", "demo", "--out", "out.json"), "stderr", signals=ASKED),
    "train": Command(
        ("train", *SMALL, "--task", "sums:easy", "--steps", "2", "--out", "out"), "out/logs/*.log", signals=HUNG_UP
    ),
    "sanity": Command(("sanity", *SMALL, "--task", "sums:easy", "--steps", "2", "--out", "out"), imports=EVERY),
    "report": Command(("report", "run"), imports=EVERY),
    "import": Command(("import", "log", "--out", "out"), "out/.writing-log"),
    "explain": Command(("explain", "imported", "--model", "demo"), imports=EVERY),
    "score": Command(("score", "imported", "--model", "demo", "--out", "out"), "out/logs/*.log", signals=ASKED),
    "watch": Command(("watch", "log", "--idle", "60"), imports=EVERY),
    "gate": Command(("gate", "run", "run", "--config", "gate.toml"), imports=EVERY),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Command], Path]:
    """A folder with what the words of a command name."""

    @cache
    def folder(command: Command) -> Path:
        folder = tmp_path_factory.mktemp("given")
        if "run" in command.words:
            simulated_run(folder / "run", Simulation(num_prompts=2), with_summary=True)
            (folder / "gate.toml").write_text('[[gate.check]]\nmetric = "kl_k3"\nmax = 1.0\n')
        if "log" in command.words:
            (folder / "log").mkdir()
            write(folder / "log" / "step_0.jsonl", rows(2000))
        if "imported" in command.words:
            (folder / "log").mkdir()
            write(folder / "log" / "step_0.jsonl", rows(24, tokens=8, prompt_token_ids=[257, 40]))
            probe("import", folder / "log", "--out", folder / "imported", code=ExitCode.PASS)
        return folder

    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_left_a_few_seconds_after(name: str, given: Callable[[Command], Path], tmp_path: Path) -> None:
    command = COMMANDS[name]
    killed = [Killed(command, number, tmp_path / number.name, given(command)) for number in command.signals]
    try:
        kill_at_work(killed)
        for one in killed:
            one.check()
    finally:
        for one in killed:
            one.end()


def test_an_engine_over_two_ranks_that_ends_by_itself_leaves_nothing_either(
    given: Callable[[Command], Path], tmp_path: Path
) -> None:
    command = COMMANDS["compare-on-two-ranks"]
    short = replace(command, words=(*command.words, "--num-prompts", "1", "--max-new-tokens", "2"))
    ended = Killed(short, None, tmp_path / "run", given(short))
    try:
        kill_at_work([ended])
        ended.check()
    finally:
        ended.end()


def kill_at_work(runs: "Sequence[Killed]") -> None:
    """Each as soon as it is at work, so that none ends by itself while another one starts."""
    begun, idle = time.monotonic(), list(runs)
    while idle and time.monotonic() - begun < PATIENCE_SECONDS:
        for run in [run for run in idle if run.is_at_work()]:
            run.kill()
            idle.remove(run)
        time.sleep(0.02)
    assert not idle, idle[0].errors()


class Killed:
    """One run of a command in a folder of its own, whose processes are known by it and by a variable they inherit.

    number: of the signal that it gets at work; without one it is waited for. given: what its folder holds before.
    """

    def __init__(self, command: Command, number: signal.Signals | None, folder: Path, given: Path) -> None:
        self._command, self._number, self._folder = command, number, folder
        self._mark = uuid.uuid4().hex
        self._temporary = Path(mkdtemp(prefix="killed-"))  # short, as the path of a socket has to be
        shutil.copytree(given, folder)
        path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {"TORCHINDUCTOR_CACHE_DIR": default_cache_dir()}  # torch's own, for later runs: no scratch folder
        environment = {MARK: self._mark, "TMPDIR": str(self._temporary), "PYTHONPATH": path, **kept}
        if number not in command.spawns:
            environment[FORKS] = "1"
        self._stack = ExitStack()
        self._process = self._begin(environment)

    def _begin(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | WarmProcess:
        words, folder, errors = ("mismatch_probe", *self._command.words), self._folder, self._folder / "stderr"
        if self._number not in self._command.imports:
            return self._stack.enter_context(
                warm_process(*words, folder=folder, errors=errors, environment=environment, every_core=True)
            )
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=self._stack.enter_context(errors.open("wb")),
            preexec_fn=take_every_core,
        )

    def is_at_work(self) -> bool:
        """An assertion fails where it ended before."""
        assert self._process.poll() is None, self.errors()
        sign = self._command.at_work
        if not self._is_heeding() or (sign is not None and not any(self._written(sign))):
            return False
        if self._command.shares_memory and not self._segments():
            time.sleep(0.3)
            return False
        assert self._process.pid in self._left(), "the mark does not tell the processes of the command"
        return True

    def kill(self) -> None:
        self._shared = self._segments()
        if self._number is None:
            self._process.wait()
        else:
            os.kill(self._process.pid, self._number)

    def check(self) -> None:
        begun = time.monotonic()
        while (left := self._left()) and time.monotonic() - begun < ENDING_SECONDS:
            time.sleep(0.05)
        assert not left, f"{self._number!r}: {left}, the command is {self._process.pid}; {self.errors()}"
        assert self._process.wait() == (ExitCode.PASS if self._number is None else CODES[self._number]), self.errors()
        assert list(self._folder.rglob(".localize-*")) == []
        left_files = [path.name for path in self._temporary.iterdir()]
        assert [name for name in left_files if not name.startswith("torchinductor")] == [], "but torch's own cache"
        assert [segment for segment in self._shared if segment.exists()] == []
        assert "Traceback" not in self.errors()

    def end(self) -> None:
        """Whatever a failed check leaves."""
        for pid in self._left():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._stack.close()
        shutil.rmtree(self._temporary)

    def _is_heeding(self) -> bool:
        """Whether it catches SIGTERM by now, as the very start of Python does not."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return True
        caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt:\t0")
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def _written(self, pattern: str) -> list[Path]:
        return [path for path in self._folder.glob(pattern) if path.stat().st_size]

    def _left(self) -> list[int]:
        return processes_of(self._folder, f"{MARK}={self._mark}")

    def _segments(self) -> set[Path]:
        """Shared memory with a name that its processes have open."""
        found: set[Path] = set()
        for pid in self._left():
            with suppress(OSError):
                paths = (line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
                found |= {Path(path) for path in paths if path.startswith("/dev/shm/")}
        return {segment for segment in found if segment.exists()}

    def errors(self) -> str:
        return (self._folder / "stderr").read_text()
