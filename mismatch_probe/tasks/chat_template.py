"""A chat template is a program that came with a checkpoint: it runs in a process of its own, within bounds.

The process is a copy of this one, so it starts in no time and renders with the same library.
"""

import json
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mismatch_probe.errors import UsageError, said
from mismatch_probe.inert import shortened
from mismatch_probe.tasks.prompt import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_SECONDS: Final = 5.0
"""Of processor time, for one conversation."""
MOST_CHARACTERS: Final = 10_000_000
_MOST_BYTES: Final = 2**30
"""Of memory, besides what the process has when it starts."""
_MOST_WAITING_SECONDS: Final = 120.0
"""On a busy machine processor time passes slowly."""
_MOST_SAID: Final = 1000

Conversation = tuple[str, list[Message]]
"""What a sentence calls the prompt, and its messages."""


@contextmanager
def rendered(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Conversation], mend: str
) -> Iterator[Iterator[str]]:
    """The text that the template makes of each conversation, one after the other; `mend` ends the sentence of an error.

    Raises (while they are taken):
        UsageError: the template fails, or takes more time, memory or room than a template needs.
    """
    if not conversations:
        yield iter(())
        return
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(tokenizer, conversations, reading, writing), daemon=True)
    _start(process)
    writing.close()
    try:
        yield (_received(label, reading, process, mend) for label, _ in conversations)
    finally:
        process.kill()
        process.join()
        reading.close()


def _start(process: BaseProcess) -> None:
    """Ctrl-C is for the parent, which ends the child. The threads that a copy lacks belong to parts it does not use."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(label: str, reading: Connection, process: BaseProcess, mend: str) -> str:
    endless = {"error": f"it came to no end within {MOST_SECONDS:g} s"}
    try:
        answer = json.loads(reading.recv_bytes()) if reading.poll(_MOST_WAITING_SECONDS) else endless
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGPROF
        answer = endless if killed else {"error": f"its process ended with {process.exitcode}"}
    if "error" in answer:
        raise UsageError(f"the chat template failed on {label} ({answer['error']}); {mend}")
    return str(answer["text"])


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[Conversation],
    reading: Connection,
    writing: Connection,
) -> None:
    reading.close()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _own_bytes() + _MOST_BYTES)
    for _, messages in conversations:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        writing.send_bytes(json.dumps(_answer(tokenizer, messages)).encode())


def _answer(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> dict[str, str]:
    try:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        text.encode()
    except MemoryError:
        return {"error": f"it needs more than {_MOST_BYTES / 2**30:g} GiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template is a program and raises what it likes
        return {"error": shortened(said(error), _MOST_SAID, keep="start")}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it made {len(text):,} characters, more than the {MOST_CHARACTERS:,} that are read"}
    return {"text": text}


def _own_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
