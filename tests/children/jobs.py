"""What jobs of the tests do in their own process."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mismatch_probe.children.messages import Send, own_token
from mismatch_probe.errors import RunDirectoryError

IMPORTED_BY = os.getpid()


def counts(send: Send, most: int) -> dict[str, int]:
    for number in range(most):
        send({"number": number})
    print("{noise}")
    return {"sum": sum(range(most))}


def refuses(send: Send, sentence: str) -> None:
    raise RunDirectoryError(sentence)


def stumbles(send: Send) -> None:
    raise KeyError("what\nand where")


def gives_up(send: Send) -> None:
    print("illegal instruction", flush=True)
    os._exit(7)


def exits(send: Send) -> None:
    sys.exit("libcudart.so.13: cannot open")


def is_killed(send: Send) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(send: Send) -> None:
    print("about to", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves_a_process(send: Send, mark: str) -> None:
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    Path(mark).touch()


def sleeps(send: Send, scratch: str = "") -> None:
    """With a process of its own beside it, writing into the scratch folder."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if scratch:
        (Path(scratch) / "activations").write_text("x")
    send([os.getpid(), child.pid])
    time.sleep(60)


def holds_memory(send: Send, then: str) -> str:
    """A segment under the job's token, left there however it ends."""
    segment = Path("/dev/shm") / f"{own_token()}-ranks-0"
    segment.write_text("x")
    send(str(segment))
    if then == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "sleeps":
        time.sleep(60)
    return str(segment)


def maps_memory(send: Send, kept: str) -> None:
    """Killed while a process that it started has memory under a library's name mapped, and a file of a person."""
    path = Path(f"/dev/shm/psm_{os.getpid():08x}")
    path.write_bytes(bytes(16))
    maps = []
    for name in (str(path), kept):
        with Path(name).open("r+b") as file:
            maps.append(mmap.mmap(file.fileno(), 16))
    send(str(path))
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def maps_memory_until_it_is_ended(send: Send) -> None:
    """With memory under a library's name that it alone has mapped, so that nobody shows it once it is gone."""
    path = Path(f"/dev/shm/psm_{os.getpid():08x}")
    path.write_bytes(bytes(16))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 16):
        send(str(path))
        time.sleep(60)


def tells_where_it_is(send: Send, variable: str) -> dict[str, Any]:
    return {
        "imported_by": IMPORTED_BY,
        "own": os.getpid(),
        "server": os.getppid(),
        "variable": os.environ.get(variable),
        "folder": str(Path.cwd()),
        "group": os.getpgid(0),
    }


def has_table_of_renamed_weights(send: Send) -> bool:
    from transformers import conversion_mapping

    return conversion_mapping._checkpoint_conversion_mapping_cache is not None
