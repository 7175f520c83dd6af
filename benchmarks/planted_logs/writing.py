"""Logs in the formats of several trainers, of the same responses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.planted_logs.base import Floats, Log, Response


def numbers(values: Floats, missing: float | None = None) -> list[float | None]:
    return [missing if np.isnan(value) else float(np.float32(value)) for value in values]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def plain(folder: Path, log: Log) -> Path:
    rows = []
    for response in log:
        row: dict[str, Any] = {
            "prompt_token_ids": response.prompt,
            "token_ids": response.ids,
            "logprobs": numbers(response.mu),
            **response.extra,
        }
        if not np.isnan(response.pi).all():
            row["train_logprobs"] = numbers(response.pi)
        if response.mask is not None:
            row["mask"] = response.mask
        rows.append(row)
    return lines(folder / "log.jsonl", rows)


def nemo_rl(folder: Path, log: Log) -> Path:
    """`train_data_stepN.jsonl`: a list of one in each field, both columns over prompt and response."""
    longest = max(len(response.prompt) + len(response.ids) for response in log)
    rows = []
    for index, response in enumerate(log):
        before, size = len(response.prompt), len(response.prompt) + len(response.ids)
        pad = [0] * (longest - size)
        rows.append(
            {
                "content": [["q", "a"]], "rewards": [0.5], "input_lengths": [size],
                "token_ids": [[*response.prompt, *response.ids, *pad]],
                "token_loss_mask": [[*[0] * before, *(response.mask or [1] * len(response.ids)), *pad]],
                "sample_loss_mask": [1.0], "advantages": [[0.0] * longest],
                "generation_logprobs": [[*[0.0] * before, *numbers(response.mu, 0.0), *pad]],
                "prev_logprobs": [[*[0.0], *[-1.5] * (before - 1), *numbers(response.pi, 0.0), *pad]],
                "idx": index,
            }
        )  # fmt: skip
    return lines(folder / "train_data_step1.jsonl", rows).parent


def slime(folder: Path, log: Log) -> Path:
    """The train dump of version 2; mu is 0 where nothing was sampled."""
    samples = [
        {
            "data_parallel_rank": 0, "sample_index": index, "rollout_position": index,
            "tokens": torch.tensor([*response.prompt, *response.ids]), "response_lengths": len(response.ids),
            "total_lengths": len(response.prompt) + len(response.ids),
            "loss_masks": torch.tensor(response.mask or [1] * len(response.ids), dtype=torch.int32),
            "rollout_log_probs": torch.tensor(numbers(response.mu, 0.0)),
            "log_probs": torch.tensor(numbers(response.pi, 0.0)), "rewards": 1.0, "truncated": 0,
        }
        for index, response in enumerate(log)
    ]  # fmt: skip
    (folder / "train_data").mkdir()
    payload = {"format_version": 2, "rollout_id": 0, "rank": 0, "samples": samples, "dp_shards": [], "raw_reward": []}
    torch.save(payload, folder / "train_data" / "0.pt")
    return folder


def vllm_answers(folder: Path, log: Log) -> Path:
    """Answers of the completions endpoint, one a line: the sampler alone."""
    rows = []
    for response in log:
        choice: dict[str, Any] = {
            "index": 0, "text": "a", "finish_reason": "stop", "token_ids": response.ids,
            "prompt_token_ids": response.prompt,
            "logprobs": {
                "text_offset": [], "token_logprobs": numbers(response.mu), "top_logprobs": [],
                "tokens": [f"token_id:{token}" for token in response.ids],
            },
        }  # fmt: skip
        if "routed_experts" in response.extra:
            choice["routed_experts"] = response.extra["routed_experts"]
        row = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "policy", "choices": [choice]}
        if "trajectory" in response.extra:
            row["trajectory"] = response.extra["trajectory"]
        rows.append(row)
    return lines(folder / "answers.jsonl", rows)


def nemo_gym(folder: Path, log: Log) -> Path:
    """A trajectory a line, its turns in order; responses without one are a trajectory each."""
    trajectories: dict[object, list[Response]] = {}
    for index, response in enumerate(log):
        trajectories.setdefault(response.extra.get("trajectory", ("alone", index)), []).append(response)
    rows = []
    for index, turns in enumerate(trajectories.values()):
        output: list[dict[str, Any]] = []
        for number, turn in enumerate(turns):
            output.append({"id": f"rs_{number}", "summary": [], "type": "reasoning"})
            output.append(
                {
                    "id": f"msg_{number}", "content": [{"annotations": [], "text": "a", "type": "output_text"}],
                    "role": "assistant", "status": "completed", "type": "message", "prompt_token_ids": turn.prompt,
                    "generation_token_ids": turn.ids, "generation_log_probs": numbers(turn.mu),
                    "routed_experts": turn.extra.get("routed_experts"),
                }
            )  # fmt: skip
        request = {"input": [{"role": "user", "content": "q"}], "temperature": 1.0, "tools": []}
        answer = {"id": f"resp_{index}", "created_at": 0.0, "model": "policy", "object": "response", "output": output}
        rows.append(
            {"responses_create_params": request, "response": answer, "reward": 1.0,
             "_ng_task_index": index, "_ng_rollout_index": 0}
        )  # fmt: skip
    return lines(folder / "rollouts.jsonl", rows)


Write = Callable[[Path, Log], Path]
BOTH_SIDES: tuple[Write, ...] = (plain, nemo_rl, slime)
WITH_TURNS: tuple[Write, ...] = (plain, nemo_gym, vllm_answers)
