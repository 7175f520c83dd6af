"""Plain logs as files. Their numbers are no model's: what is tested is that they arrive as they were written."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 24
NOISE = 0.01


def row(
    number: int, *, step: int | None = None, with_pi: bool = True, tokens: int = 30, **others: Any
) -> dict[str, Any]:
    random = np.random.default_rng(number)
    log_mu = -0.1 - random.exponential(1.0, tokens)
    log_pi = log_mu + random.normal(0, NOISE, tokens)
    found: dict[str, Any] = {
        "prompt_token_ids": [1, 5, 10 + number // 2],
        "token_ids": random.integers(3, 200, tokens).tolist(),
        "logprobs": log_mu.tolist(),
    }
    if with_pi:
        found["train_logprobs"] = log_pi.tolist()
    if step is not None:
        found["step"] = step
    return found | others


def rows(count: int = ROWS, **others: Any) -> list[dict[str, Any]]:
    return [row(number, **others) for number in range(count)]


def write(path: Path, written: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in written))
    return path


def mean_abs(written: Sequence[Mapping[str, Any]]) -> float:
    """Mean of abs(log pi - log mu) over the tokens whose mask is true."""
    deviations = []
    for one in written:
        mask = np.asarray(one.get("mask", [True] * len(one["token_ids"])), dtype=bool)
        deviations.append(np.abs(np.subtract(one["train_logprobs"], one["logprobs"]))[mask])
    return float(np.concatenate(deviations).mean())


def log_of_levels(path: Path, levels: Sequence[float], responses: int = 16) -> Path:
    """A step for each level, the standard deviation of d (nats)."""
    lines: list[dict[str, Any]] = []
    for step, level in enumerate(levels):
        for number in range(responses):
            line = row(100 * step + number, step=step)
            noise = np.random.default_rng(1000 * step + number).normal(0, level, len(line["logprobs"]))
            line["train_logprobs"] = (-np.abs(np.asarray(line["logprobs"]) + noise)).tolist()
            lines.append(line)
    return write(path, lines)
