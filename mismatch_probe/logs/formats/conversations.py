"""Conversations of agents, a record a trajectory with the ids of each turn: NeMo Gym's rollouts, Harbor's results,
rllm's episodes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from mismatch_probe.logs.format import Format, Holds
from mismatch_probe.logs.look import FileKind, FileLook, look_at
from mismatch_probe.logs.recorded_choices import routed_experts
from mismatch_probe.logs.row import Row, Tell, read_lines, read_object
from mismatch_probe.records.sequences import LoggedResponse

_GYM: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_HARBOR: Final = ("prompt_token_ids", "completion_token_ids", "logprobs")
_RLLM: Final = ("prompt_ids", "response_ids", "logprobs")


def _turn(
    row: Row, columns: tuple[str, str, str], *, where: str, trajectory: str, group: str | None, step: int | None,
    model: str | None = None,
) -> LoggedResponse | None:  # fmt: skip
    """One turn; None where its ids were not recorded, as where they are empty."""
    of_prompt, of_completion, of_log_probs = columns
    if not row.columns.get(of_prompt) or not row.columns.get(of_completion):
        return None
    token_ids = row.ids(of_completion)
    return LoggedResponse(
        where=where,
        prompt_token_ids=row.ids(of_prompt),
        token_ids=token_ids,
        sampled=np.ones(token_ids.size, np.bool_),
        log_mu=row.numbers(of_log_probs, token_ids.size) if row.columns.get(of_log_probs) else None,
        step=step,
        weight_version=row.text("weight_version"),
        group=group,
        trajectory=trajectory,
        model=model,
        experts=routed_experts(row, "routed_experts"),
    )


def _gym_turns(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for line in read_lines(path, tell):
        response = line.inside("response")
        group = line.text("_ng_task_index")
        for number, item in enumerate(response.rows("output")):
            turn = _turn(
                item,
                _GYM,
                where=f"output {number} of {line.where}",
                trajectory=line.where,
                group=group,
                step=line.integer("step"),
                model=response.text("model"),
            )
            if turn is not None:
                yield turn


def _harbor_turns(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for record in _records(path, tell):
        result = record.inside("agent_result") if record.has("agent_result") else record
        segments = [result] if _is_segment(result.columns) else _segments(result)
        for number, segment in enumerate(segments):
            trajectory = f"{record.where}, rollout {number}" if len(segments) > 1 else record.where
            for turn, columns in enumerate(_turns_of_segment(segment)):
                response = _turn(
                    Row(segment.where, columns),
                    _HARBOR,
                    where=f"turn {turn} of {trajectory}",
                    trajectory=trajectory,
                    group=record.text("task_name"),
                    step=record.integer("step"),
                )
                if response is not None:
                    yield response


def _records(path: Path, tell: Tell) -> Iterator[Row]:
    return iter([read_object(path)]) if look_at(path).kind == FileKind.DOCUMENT else read_lines(path, tell)


def _segments(result: Row) -> list[Row]:
    return result.rows("rollout_details") if result.has("rollout_details") else []


def _is_segment(columns: Any) -> bool:
    return "prompt_token_ids" in columns and "completion_token_ids" in columns


def _turns_of_segment(segment: Row) -> Iterator[dict[str, Any]]:
    """The columns of each turn. Harbor appends to each list alone, so that lists of other lengths cannot be paired."""
    lists = [segment.columns.get(name) or [] for name in _HARBOR]
    if not all(isinstance(values, list) and all(isinstance(item, list) for item in values) for values in lists):
        raise segment.refusal(f"{', '.join(_HARBOR)} are no lists of a list a turn")
    prompts, completions, log_probs = lists
    if len(prompts) != len(completions):
        if prompts and completions:
            raise segment.refusal(
                f"it has {len(prompts)} prompts and {len(completions)} completions, so that nothing says which of "
                "them belong together"
            )
        return
    if len(log_probs) != len(completions):
        log_probs = [[]] * len(completions)
    for values in zip(prompts, completions, log_probs, strict=True):
        yield dict(zip(_HARBOR, values, strict=True))


def _rllm_turns(path: Path, tell: Tell) -> Iterator[LoggedResponse]:
    for record in _records(path, tell):
        task = (record.text("id") or "").rpartition(":")[0]
        for number, trajectory in enumerate(record.rows("trajectories")):
            of_trajectory = f"trajectory {number} of {record.where}"
            for turn, step in enumerate(trajectory.rows("steps")):
                response = _turn(
                    step,
                    _RLLM,
                    where=f"step {turn} of {of_trajectory}",
                    trajectory=of_trajectory,
                    group=task or None,
                    step=None,
                )
                if response is not None:
                    yield response


def has_step_ids(look: FileLook) -> bool:
    """Whether the steps of an episode of rllm have token ids: one that was evaluated at another's server has none."""
    return look.inside.get("trajectories.steps", frozenset()).issuperset(_RLLM[:2])


def _is_rllm_with_ids(look: FileLook) -> bool:
    return look.json_with("id", "task", "trajectories") and has_step_ids(look)


def _is_gym(look: FileLook) -> bool:
    return look.objects_with("response", "output") and "responses_create_params" in look.keys


def _is_harbor(look: FileLook) -> bool:
    has_details = "rollout_details" in look.keys | look.inside.get("agent_result", frozenset())
    return look.json_with() and (has_details or _is_segment(look.keys))


NEMO_GYM: Final = Format(
    name="nemo_gym",
    title="NeMo Gym's rollouts",
    holds=Holds.SAMPLER,
    fits=_is_gym,
    responses=_gym_turns,
    step_of=lambda path: None,
)
HARBOR: Final = Format(
    name="harbor",
    title="Harbor's result of a trial",
    holds=Holds.SAMPLER,
    fits=_is_harbor,
    responses=_harbor_turns,
    step_of=lambda path: None,
)
RLLM: Final = Format(
    name="rllm",
    title="rllm's saved episodes",
    holds=Holds.SAMPLER,
    fits=_is_rllm_with_ids,
    responses=_rllm_turns,
    step_of=lambda path: None,
)
