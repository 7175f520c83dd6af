"""`python -m MODULE WORDS` in a process of its own, forked from one that has imported torch, transformers and vLLM.

It has its own environment, folder, streams, process group and exit code, and costs milliseconds where a new interpreter
imports for ten seconds. Only what imports do, and what Python does at its end, is not to be seen in it.
"""

import os
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mismatch_probe.children.messages import Send
from mismatch_probe.children.start import Job, started
from mismatch_probe.errors import ExitCode, MismatchProbeError
from tests.command_line import Answer
from tests.cores import take_every_core

ROOT = Path(__file__).parents[1]
OnStart = Callable[[int], None]


def warm_python(
    module: str,
    *words: object,
    environment: Mapping[str, str] | None = None,
    on_start: OnStart = lambda pid: None,
    code: int | None = ExitCode.PASS,
) -> Answer:
    """What `python -m MODULE WORDS` said and how it ended, which must be with `code` unless that is None.

    on_start: called with the process's id once it runs.

    Raises:
        MismatchProbeError: it was killed.
    """
    with _running(module, words, environment or {}) as ended:
        answer = ended(on_start)
    assert code is None or answer.returncode == code, answer.stderr
    return answer


def warm_ranks(ranks: int, module: str, *words: object, environment: Mapping[str, str] | None = None) -> list[Answer]:
    """The same on several ranks, with the variables that `torchrun --nproc-per-node RANKS` gives each."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(_running(module, words, {**(environment or {}), **variables}))
            for variables in _torchrun(ranks)
        ]
        answers = [ended(lambda pid: None) for ended in running]
    for answer in answers:
        assert answer.returncode == ExitCode.PASS, answer.stderr
    return answers


def warm_ranks_with_one_killed(
    ranks: int, module: str, *words: object, on_start_of_last: OnStart
) -> tuple[Answer, MismatchProbeError]:
    """What the first of several ranks said, and how the last one ended, which `on_start_of_last` has killed."""
    with ExitStack() as stack:
        first, *_, last = [stack.enter_context(_running(module, words, variables)) for variables in _torchrun(ranks)]
        try:
            raise AssertionError(last(on_start_of_last).stderr)
        except MismatchProbeError as error:
            killed = error
        return first(lambda pid: None), killed


def warm_together(module: str, *words_of_each: Sequence[object]) -> list[Answer]:
    """The same module several times at once, each with words of its own, however they end."""
    with ExitStack() as stack:
        running = [stack.enter_context(_running(module, tuple(words), {})) for words in words_of_each]
        return [ended(lambda pid: None) for ended in running]


@contextmanager
def _running(
    module: str, words: tuple[object, ...], environment: Mapping[str, str]
) -> Iterator[Callable[[OnStart], Answer]]:
    with TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        given = [str(word) for word in words]
        job = Job(module, "tests.warm_python:become", (module, given, dict(environment), streams), "engine", "")

        def ended(result: Callable[[OnStart], Any], on_start: OnStart) -> Answer:
            code = result(on_start)
            output, errors = (Path(stream).read_text(encoding="utf-8") for stream in streams)
            return Answer(code, output, errors)

        with started(job) as result:
            yield partial(ended, result)


def become(send: Send, module: str, words: list[str], environment: dict[str, str], streams: list[str]) -> int:
    """Run the module as the program of this process and return its exit code."""
    import torch

    for standard, stream in zip((1, 2), streams, strict=True):
        opened = os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, standard)
        os.close(opened)
    os.environ.update(environment)
    if "WORLD_SIZE" in environment or module == "torch.distributed.run":
        take_every_core()
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [module, *words]
    send(os.getpid())
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except Exception:  # noqa: BLE001 - what Python does at the boundary of a process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _torchrun(ranks: int) -> Iterator[dict[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in map(str, range(ranks)):
        yield {
            **{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "ROLE_RANK": rank},
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
