"""The whole log as parquet files, one folder a step, written and read in bounded memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from mismatch_probe.records.legs import log_table
from mismatch_probe.records.sequences import LoggedResponse
from mismatch_probe.records.tables import read_table, write_table

_TOKENS_A_FILE: Final = 1_000_000
_TOKENS_OF_A_SMALL_STEP: Final = 4096
_MOST_SMALL_STEPS: Final = 256
_SMALL_STEPS: Final = "small-steps"
_TOKENS_HELD: Final = 4_000_000
"""Of all steps together; a log whose steps are mixed is written in more files."""
_TOKENS_OF_A_RESPONSE: Final = 64
"""What holding a response takes beside its tokens, in the memory of one: about 2.5 KiB."""
_CHARACTERS_OF_A_TOKEN: Final = 32


class Partitions:
    """`RUN/log/step-000003/00000.parquet`, or `RUN/log/no-step/...` where the log has no steps.

    Of very many small steps those that are left at the end share files, in `RUN/log/small-steps/`: a file each would
    take longer than all the rest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[int | None, list[tuple[str, LoggedResponse]]] = {}
        self._tokens: dict[int | None, int] = {}
        self._held = 0
        self._files: dict[str, int] = {}

    def add(self, prompt_id: str, response: LoggedResponse) -> None:
        """
        Raises:
            StorageError: the disk refused.
        """
        step = response.step
        self._waiting.setdefault(step, []).append((prompt_id, response))
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        self._tokens[step] = self._tokens.get(step, 0) + num_tokens
        self._held += num_tokens + _beside_tokens(response)
        if self._tokens[step] >= _TOKENS_A_FILE:
            self._write([step], _name(step))
        elif self._held >= _TOKENS_HELD:
            self.finish()

    def finish(self) -> None:
        """Write what waits. Raises as `add`."""
        small = [step for step, num_tokens in self._tokens.items() if num_tokens < _TOKENS_OF_A_SMALL_STEP]
        if len(small) > _MOST_SMALL_STEPS:
            self._write(small, _SMALL_STEPS)
        for step in list(self._waiting):
            self._write([step], _name(step))

    def _write(self, steps: Sequence[int | None], folder: str) -> None:
        in_order = sorted(steps, key=lambda step: -1 if step is None else step)
        prompt_ids, responses = zip(*(row for step in in_order for row in self._waiting.pop(step)), strict=True)
        self._held -= sum(self._tokens.pop(step) for step in steps) + sum(map(_beside_tokens, responses))
        number = self._files.get(folder, 0)
        self._files[folder] = number + 1
        write_table(self._folder / folder / f"{number:05d}.parquet", log_table(prompt_ids, responses))


def partitions(folder: Path) -> Iterator[pa.Table]:
    """The tables of a log, in the order of its steps.

    Raises:
        BrokenRecord: a file cannot be read.
    """
    for path in sorted(folder.glob("*/*.parquet")):
        yield read_table(path)


def _beside_tokens(response: LoggedResponse) -> int:
    characters = len(response.where)
    for text in (response.weight_version, response.group, response.finish_reason, response.model):
        if text is not None:
            characters += len(text)
    return _TOKENS_OF_A_RESPONSE + characters // _CHARACTERS_OF_A_TOKEN


def _name(step: int | None) -> str:
    return "no-step" if step is None else f"step-{step:06d}"
