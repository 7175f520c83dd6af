"""`python -m mismatch_probe.children.server STAGES`: imports once what jobs need, starts them, and ends them.

It lives as long as its parent: when that is gone, however it ended, the server ends every job with whatever the job
started, and the processes of an engine of the parent's own, removes their shared memory and the parent's scratch
folders, and ends itself. It does no work of its own, so nothing delays that.

A job is forked from the imported modules, which takes milliseconds. Where a fork cannot be used, a job is an
interpreter of its own: on a machine with a GPU, whose driver does not survive a fork once a library has touched it, and
where an import failed or left threads running, so that the job meets the failure itself.
"""

import gc
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from mismatch_probe.children.job import JobRequest, run_and_exit
from mismatch_probe.children.messages import (
    SHARED_MEMORY_VARIABLE,
    end_processes_with,
    receive,
    remove_left,
    send_number,
    signal_group,
)
from mismatch_probe.host import join_thread, prepare_process, renew_thread_pool

_GRACE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.02
_WATCH_MILLISECONDS: Final = 100
_GPU_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class _Server:
    """One process that has imported `modules` and serves one socket; `next_server` was forked from it."""

    def __init__(self, control: socket.socket, modules: list[str]) -> None:
        self._control = control
        with _watch(control) if modules else nullcontext():
            could_import = _import(modules)
        self._can_fork = could_import and threading.active_count() == 1
        self.next_server: int | None = None
        self._status_of: dict[int, int] = {}
        self._token_of: dict[int, str] = {}
        self._scratch: list[Path] = []
        self._engine_files: dict[str, list[Path]] = {}
        """Named memory of libraries that engines of the parent use, by their tokens."""

    def serve(self) -> None:
        wake_reader, wakes = socket.socketpair()
        for end in (wake_reader, wakes):
            end.setblocking(False)
        self._own = (self._control, wake_reader, wakes)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake_reader:
                        with suppress(BlockingIOError):
                            wake_reader.recv(4096)
                    elif not self._hear():
                        self._end()
                        return
                self._reap()

    def _hear(self) -> bool:
        """Take one request; False when the parent is gone."""
        message = receive(self._control)
        if message is None:
            return False
        content, descriptors = message
        if "scratch" in content:
            self._scratch.append(Path(content["scratch"]))
        elif "engine" in content:
            self._engine_files[content["engine"]] = [Path(file) for file in content["files"]]
        elif "warm" not in content:
            self._start(JobRequest(**content), *descriptors)
        return True

    def _start(self, request: JobRequest, log: int, messages: int, status: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(request, log, messages, status)
        with suppress(OSError):
            os.setpgid(pid, pid)
        os.close(log)
        os.close(messages)
        self._status_of[pid] = status
        self._token_of[pid] = request.environment[SHARED_MEMORY_VARIABLE]
        if not send_number(status, pid):
            signal_group(pid, signal.SIGKILL)

    def _become(self, request: JobRequest, log: int, messages: int, status: int) -> None:
        """What the forked process does: a group of its own, its log, and nothing of the server's."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for connection in self._own:
            connection.close()
        for descriptor in (status, *self._status_of.values()):
            os.close(descriptor)
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        os.environ.clear()
        os.environ.update(request.environment)
        if self._can_fork:
            renew_thread_pool()
            run_and_exit(request, messages)
        os.set_inheritable(messages, True)
        words = [sys.executable, "-m", "mismatch_probe.children.job", request.to_json(), str(messages)]
        os.execv(sys.executable, words)

    def _reap(self) -> None:
        """Report the jobs that ended; what they leave running ends with them."""
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None:
                return
            status = self._status_of.pop(child.si_pid, None)
            mapped_files: set[Path] = set()
            if status is not None:
                mapped_files = signal_group(child.si_pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child.si_pid, 0)[1])
            if status is not None:
                remove_left(self._token_of.pop(child.si_pid), mapped_files)
                send_number(status, code)
                os.close(status)

    def _end(self) -> None:
        tokens = dict(self._token_of)
        mapped_files = {pid: signal_group(pid, signal.SIGTERM) for pid in self._status_of}
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._status_of and time.monotonic() < deadline:
            self._reap()
            time.sleep(_POLL_SECONDS)
        for pid in self._status_of:
            mapped_files[pid] |= signal_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid, segments in mapped_files.items():
            remove_left(tokens[pid], segments)
        if self.next_server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self.next_server, 0)
        for token, files in self._engine_files.items():
            remove_left(token, {*files, *end_processes_with(token)})
        _remove(self._scratch)


def main(stages: list[list[Any]]) -> None:
    """Serve the first stage, `[descriptor, modules]`, and from a fork of it those behind it, which import on top once
    anything is asked of them.
    """
    prepare_process()
    (descriptor, modules), *later_stages = stages
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    server = _Server(control, modules)
    if later_stages:
        pid = os.fork()
        if pid == 0:
            control.close()
            if _is_asked(later_stages[0][0]):
                main(later_stages)
            os._exit(0)
        server.next_server = pid
        for other, _ in later_stages:
            os.close(other)
    server.serve()


def _is_asked(descriptor: int) -> bool:
    """Wait until something is asked; False where the parent is gone before."""
    with socket.socket(fileno=os.dup(descriptor)) as control:
        try:
            return bool(control.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False


def _import(modules: list[str]) -> bool:
    """Import, or call the function of a `MODULE:NAME`, without the collector's pauses, and say whether that was right
    and went well.
    """
    if any(Path(device).exists() for device in _GPU_DEVICES):
        return False
    gc.disable()
    try:
        for name, _, function in (each.partition(":") for each in modules):
            module = import_module(name)
            if function:
                getattr(module, function)()
    except (Exception, SystemExit):  # noqa: BLE001 - the job imports it again and says what is wrong
        return False
    finally:
        gc.freeze()
        gc.enable()
    return True


@contextmanager
def _watch(control: socket.socket) -> Iterator[None]:
    """While the body imports, which takes long, a parent that goes away ends the process all the same."""
    end_event = threading.Event()

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(control, 0)
        while not end_event.is_set():
            if hung_up.poll(_WATCH_MILLISECONDS):
                _remove(_asked_scratch(control))
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end_event.set()
        join_thread(thread)


def _asked_scratch(control: socket.socket) -> list[Path]:
    """The scratch folders in requests that nobody has read yet."""
    folders = []
    while (message := receive(control)) is not None:
        if "scratch" in message[0]:
            folders.append(Path(message[0]["scratch"]))
    return folders


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # without freeing what it has imported, for which its parent would wait
