"""`python -m MODULE WORDS` in a process of its own, forked from one that has imported torch, transformers and vLLM.

It has its own environment, folder, streams, session and exit code, and so have the servers of its jobs, which are forks
of it: they cost milliseconds where new interpreters import for twenty seconds. Only what imports do, and what Python
does at its end, is not to be seen in it.
"""

import faulthandler
import os
import runpy
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from mismatch_probe.children import messages, servers
from mismatch_probe.children.messages import Send
from mismatch_probe.children.servers import Preload
from mismatch_probe.children.start import Job, Process, process_of, result_of
from mismatch_probe.errors import ExitCode
from tests.command_line import Answer
from tests.cores import take_every_core
from tests.forks import (
    FORKS,
    ForkedServers,
    as_server_of_vllm,
    as_torchrun,
    close_all_but,
    fork_processes_of_vllm,
    take_threads,
)
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
LONGEST_SECONDS: Final = 500.0
"""After which a process that a test waits for hangs: it ends before pytest's own limit, and its errors say where."""
OnStart = Callable[[int], None]


def warm_python(
    module: str,
    *words: object,
    environment: Mapping[str, str] | None = None,
    on_start: OnStart = lambda pid: None,
    code: int | None = ExitCode.PASS,
    every_core: bool = False,
    preload: Preload = "engine",
) -> Answer:
    """What `python -m MODULE WORDS` said and how it ended, which must be with `code` unless that is None.

    on_start: called with the process's id once it runs. A code below zero is the signal that ended it. preload: what
    the process that it is forked from has imported; `training` has no vLLM in it.
    """
    with _running(module, words, environment or {}, every_core=every_core, preload=preload) as ended:
        answer = ended(on_start)
    assert code is None or answer.returncode == code, answer
    return answer


def warm_ranks(ranks: int, module: str, *words: object, environment: Mapping[str, str] | None = None) -> list[Answer]:
    """The same on several ranks, with the variables that `torchrun --nproc-per-node RANKS` gives each."""
    answers = _on_ranks(ranks, module, words, environment or {}, lambda pid: None)
    for answer in answers:
        assert answer.returncode == ExitCode.PASS, answer
    return answers


def warm_ranks_with_one_killed(
    ranks: int, module: str, *words: object, on_start_of_last: OnStart
) -> tuple[Answer, Answer]:
    """What the first of several ranks said, and the last one, which `on_start_of_last` has killed."""
    first, *_, last = _on_ranks(ranks, module, words, {}, on_start_of_last)
    return first, last


def warm_together(module: str, *words_of_each: Sequence[object]) -> list[Answer]:
    """The same module several times at once, each with words of its own, however they end."""
    with ExitStack() as stack:
        running = [stack.enter_context(_running(module, tuple(words), {})) for words in words_of_each]
        return [ended(lambda pid: None) for ended in running]


def _on_ranks(
    ranks: int, module: str, words: tuple[object, ...], environment: Mapping[str, str], on_start_of_last: OnStart
) -> list[Answer]:
    with ExitStack() as stack:
        *running, last = [
            stack.enter_context(_running(module, words, {**environment, **variables})) for variables in _torchrun(ranks)
        ]
        answer = last(on_start_of_last)
        return [*(ended(lambda pid: None) for ended in running), answer]


@contextmanager
def _running(
    module: str,
    words: tuple[object, ...],
    environment: Mapping[str, str],
    *,
    every_core: bool = False,
    preload: Preload = "engine",
) -> Iterator[Callable[[OnStart], Answer]]:
    with TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdout", "stderr")]
        every_core = every_core or "WORLD_SIZE" in environment or module == "torch.distributed.run"
        job = _job(
            (module, *words), environment, Path.cwd(), streams, LONGEST_SECONDS, every_core=every_core, preload=preload
        )
        with result_of(job) as result:

            def ended(on_start: OnStart) -> Answer:
                code = result(on_start)
                return Answer(code, *(stream.read_text(encoding="utf-8") for stream in streams))

            yield ended


@contextmanager
def warm_process(
    module: str,
    *words: object,
    folder: Path,
    errors: Path,
    output: Path = Path(os.devnull),
    environment: Mapping[str, str] | None = None,
    every_core: bool = False,
) -> Iterator["WarmProcess"]:
    """The process beside the body, in that folder, its errors and its output added to files.

    It is ended with the body; what it starts is left to itself.
    """
    streams = (output, errors)
    with process_of(_job((module, *words), environment or {}, folder, streams, None, every_core=every_core)) as job:
        yield WarmProcess(job)


class WarmProcess:
    """As `subprocess.Popen` shows one."""

    def __init__(self, job: Process) -> None:
        self._job = job
        self._code: int | None = None
        pids: list[int] = []
        while not pids:
            assert job.hear(pids.append), "it did not start"
        [self.pid] = pids

    def poll(self) -> int | None:
        return self.wait() if select.select([self._job], [], [], 0)[0] else None

    def wait(self) -> int:
        if self._code is None:
            self._code = self._job.result()
        assert self._code is not None
        return self._code


def _job(
    words: Sequence[object],
    environment: Mapping[str, str],
    folder: Path,
    streams: Sequence[Path],
    seconds: float | None,
    *,
    every_core: bool,
    preload: Preload = "engine",
) -> Job:
    arguments = (list(map(str, words)), dict(environment), str(folder), list(map(str, streams)), seconds, every_core)
    return Job(str(words[0]), fork_and_wait, arguments, preload, "")


def fork_and_wait(
    send: Send,
    words: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[str],
    seconds: float | None,
    every_core: bool,
) -> int:
    """Fork the process, tell its id, and return the code that it ends with.

    seconds: after so many it, and each fork of it, writes where its threads stand and ends.

    What is ended here ends the process too; the server that this is a job of does nothing for what the process leaves.
    """
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        if every_core:
            take_every_core()
        written = [os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for stream in streams]
        become(words, environment, [0, *written], seconds)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, signal.SIGKILL))
    send(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become(words: list[str], environment: dict[str, str], streams: list[int], seconds: float | None = None) -> NoReturn:
    """Run the module as the program of this fork, in a session of its own, with these descriptors as its streams."""
    code: Any = 1
    try:
        os.setsid()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
        close_all_but(())
        if seconds is not None:
            _end_after(seconds)
            os.register_at_fork(after_in_child=partial(_end_after, seconds))
        _prepare(environment)
        if words[0].startswith("vllm."):
            as_server_of_vllm()
        elif words[0] == "torch.distributed.run":
            as_torchrun()
        sys.argv = words
        sys.modules.pop(f"{words[0]}.__main__", None)  # a new interpreter has none of it
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - what Python does at the boundary of a process
        traceback.print_exc()
    finally:
        servers.close_servers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _end_after(seconds: float) -> None:
    """By an alarm, of which a fork has none: the thread of `faulthandler.dump_traceback_later` would leave it a lock
    on which it waits for ever.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _prepare(environment: dict[str, str]) -> None:
    os.environ.pop(messages.SHARED_MEMORY_VARIABLE, None)
    os.environ.update(environment)
    tempfile.tempdir = None
    servers.begin = ForkedServers
    if FORKS in environment:
        fork_processes_of_vllm()
    take_threads()
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(Path.cwd()))


def _torchrun(ranks: int) -> Iterator[dict[str, str]]:
    port = str(free_port())
    for rank in map(str, range(ranks)):
        yield {
            **{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "ROLE_RANK": rank},
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
        }
