"""Logs of texts. Without the token ids nothing can be compared, but their prompts can be asked again."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from mismatch_probe.logs.format import Format, Holds, PromptFileRow
from mismatch_probe.logs.formats.conversations import has_step_ids
from mismatch_probe.logs.look import FileLook
from mismatch_probe.logs.row import Row, Tell, read_lines, read_object
from mismatch_probe.logs.tables import read_table

_NO_IDS: Final = "it has no token ids and no log-probs"
_DECODED: Final = "it has texts that were decoded without special tokens, no token ids and no log-probs"


def _trl(path: Path, tell: Tell) -> Iterator[PromptFileRow]:
    for row in read_table(path, ("prompt",)):
        yield _prompt_row(row, row.columns.get("prompt"))


def _of_lines(prompt: str, answer: str, path: Path, tell: Tell) -> Iterator[PromptFileRow]:
    for row in read_lines(path, tell):
        yield _prompt_row(row, row.columns.get(prompt), row.columns.get(answer))


def _roll(path: Path, tell: Tell) -> Iterator[PromptFileRow]:
    for row in read_lines(path, tell):
        prompts = row.columns.get("prompt")
        if not isinstance(prompts, list):
            raise row.refusal("prompt is no list")
        for prompt in prompts:
            yield _prompt_row(row, prompt)


def _rllm(path: Path, tell: Tell) -> Iterator[PromptFileRow]:
    row = read_object(path)
    task = row.columns.get("task")
    yield _prompt_row(row, task.get("question") if isinstance(task, dict) else task)


def _prompt_row(row: Row, prompt: Any, answer: Any = None) -> PromptFileRow:
    if not isinstance(prompt, str | list):
        raise row.refusal("its prompt is neither a text nor messages")
    return {"prompt": prompt} if answer is None else {"prompt": prompt, "answer": str(answer)}


def _is_rllm_of_texts(look: FileLook) -> bool:
    """One that its trainer's logger wrote, or one that was saved without the ids of its steps."""
    return look.json_with("task", "trajectories") and bool(look.keys & {"id", "episode_id"}) and not has_step_ids(look)


def _step_of_folder(path: Path) -> int | None:
    """The number of the folder that a file is in."""
    return int(path.parent.name) if path.parent.name.isdecimal() and len(path.parent.name) < 16 else None


TRL: Final = Format(
    name="trl",
    title="TRL's table of completions",
    holds=Holds.PROMPTS,
    fits=lambda look: look.table_with("step", "prompt", "completion"),
    prompts=_trl,
    why_not=_DECODED,
)
VERL_TEXT: Final = Format(
    name="verl_text",
    title="verl's rollout_data_dir",
    holds=Holds.PROMPTS,
    fits=lambda look: look.lines_with("input", "output", "score", "step"),
    prompts=partial(_of_lines, "input", "gts"),
    why_not=_DECODED,
)
AREAL: Final = Format(
    name="areal",
    title="AReaL's rollout dump",
    holds=Holds.PROMPTS,
    fits=lambda look: look.lines_with("task_id", "sample_idx", "tail_version", "prompt", "completion"),
    prompts=partial(_of_lines, "prompt", ""),
    why_not=_NO_IDS,
    step_of=_step_of_folder,
)
ROLL: Final = Format(
    name="roll",
    title="ROLL's rollout_dump_dir",
    holds=Holds.PROMPTS,
    fits=lambda look: look.lines_with("prompt", "responses", "scores", "global_step"),
    prompts=_roll,
    why_not=_DECODED,
)
RLLM_TEXT: Final = Format(
    name="rllm_text",
    title="an episode of rllm without token ids",
    holds=Holds.PROMPTS,
    fits=_is_rllm_of_texts,
    prompts=_rllm,
    why_not=_NO_IDS,
)
