"""Logs of training runs that go on, and what `watch` makes of them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.lines import WatchRecord
from tests.command_line import Answer, probe
from tests.importing.logs import row, write
from tests.warm_python import WarmProcess, warm_process

ENTROPIES = np.random.default_rng(0).uniform(0.5, 2, 30).tolist()
LIMIT = """
defaults = false
[[guard]]
name = "mismatch"
metric = "mismatch/abs_logprob_diff"
rule = "limit"
above = 0.1
patience = 2
actions = ["warn", "stop"]
"""


def step_rows(noise: float = 1.0, **others: Any) -> list[dict[str, Any]]:
    """Responses of one step; the training path's side is off by as many times the usual noise."""
    found = [row(number, **others) for number in range(16)]
    for one in found:
        deviation = np.subtract(one["train_logprobs"], one["logprobs"])
        if noise != 1:
            one["train_logprobs"] = (np.asarray(one["logprobs"]) - noise * np.abs(deviation)).tolist()
    return found


def log_of(folder: Path, noises: list[float]) -> Path:
    for number, noise in enumerate(noises):
        write(folder / f"step_{number}.jsonl", step_rows(noise))
    return folder


def watched(folder: Path, *words: object, code: ExitCode) -> tuple[Answer, WatchRecord]:
    answer = probe("watch", folder, "--idle", 0, "--json", *words)
    assert answer.returncode == code, answer
    return answer, WatchRecord.model_validate_json(answer.stdout)


@dataclass(frozen=True)
class Watching:
    """A `watch` that goes on, and the files that take its document and its messages."""

    process: WarmProcess
    output: Path
    messages: Path

    def wait_for(self, start: str) -> str:
        """The first message that starts so, once it is whole."""
        while True:
            has_ended = self.process.poll() is not None
            lines = self.messages.read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines:
                if line.startswith(start) and line.endswith("\n"):
                    return line
            assert not has_ended, lines
            time.sleep(0.02)

    def end(self) -> Answer:
        code = self.process.wait()
        return Answer(code, *(path.read_text(encoding="utf-8") for path in (self.output, self.messages)))


@contextmanager
def watch_beside(path: Path, *words: object) -> Iterator[Watching]:
    """A process that watches the path beside the body, and is killed with it."""
    with TemporaryDirectory() as name:
        output, messages = (Path(name) / stream for stream in ("stdout", "stderr"))
        messages.touch()
        command = ("mismatch_probe", "watch", path, *words, "--json")
        with warm_process(*map(str, command), folder=Path.cwd(), errors=messages, output=output) as process:
            yield Watching(process, output, messages)


def old(folder: Path) -> None:
    """As if nothing had been written for an hour."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
