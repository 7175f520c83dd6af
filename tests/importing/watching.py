"""Logs of training runs that go on, and what `watch` makes of them."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.lines import WatchRecord
from tests.command_line import Answer, probe
from tests.importing.logs import row, write

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


def old(folder: Path) -> None:
    """As if nothing had been written for an hour."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
