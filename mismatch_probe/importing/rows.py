"""The rows of a log become files: the parquet of a run, a folder for each step, and a prompt file."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.config.sides import Side
from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.importing.selection import Census, PromptChoice
from mismatch_probe.logs import Format, LogChecks, LogFinding, is_copied
from mismatch_probe.reading import storable
from mismatch_probe.records.files import replacing
from mismatch_probe.records.legs import COLUMN_NAMES, choices_table, log_table
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt, LoggedResponse
from mismatch_probe.records.tables import ROLLOUTS, ids_key, leg_rows, read_table, write_table
from mismatch_probe.stats.copies import CopiedRows

LOGGED_ROLLOUTS: Final = pa.schema(
    [
        *ROLLOUTS,
        pa.field("sampled", pa.list_(pa.bool_()), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("weight_version", pa.string()),
        pa.field("weight_versions", pa.list_(pa.string())),
        pa.field("where", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
    ]
)
"""The rollouts of an imported run: also which tokens the policy sampled, each response's place in the log, and its
cluster."""

_NOT_SEEDED: Final = -1


def rows_of_choice(tables: Iterable[pa.Table], choice: PromptChoice) -> pa.Table:
    """The rows of the responses that were chosen."""
    prompt_ids = pa.array(sorted(choice.prompt_ids))
    of_prompts = (table.filter(pc.is_in(table["prompt_id"], value_set=prompt_ids)) for table in tables)
    takes_all = choice.share >= 1
    return pa.concat_tables([table if takes_all else table.filter(_is_chosen(table, choice)) for table in of_prompts])


def _is_chosen(table: pa.Table, choice: PromptChoice) -> pa.Array:
    return pa.array([choice.takes(where) for where in table["where"].to_pylist()], type=pa.bool_())


def sampled_tokens_of(tables: Iterable[pa.Table]) -> dict[str, int]:
    """The number of sampled tokens of the responses to each prompt."""
    num_tokens: dict[str, int] = {}
    for table in tables:
        masks = table["mask"].to_pylist()
        for prompt_id, mask in zip(table["prompt_id"].to_pylist(), masks, strict=True):
            num_tokens[prompt_id] = num_tokens.get(prompt_id, 0) + sum(mask)
    return num_tokens


def prompts_in(rows: pa.Table, texts: TokenTexts) -> list[EncodedPrompt]:
    """Each prompt once, in the order of the log; without a tokenizer it has no text."""
    prompts: dict[str, EncodedPrompt] = {}
    for prompt_id, token_ids in zip(
        *(rows[name].to_pylist() for name in ("prompt_id", "prompt_token_ids")), strict=True
    ):
        if prompt_id not in prompts:
            text = "".join(texts(token_ids)) if texts.has_tokenizer else ""
            prompts[prompt_id] = EncodedPrompt(prompt_id, token_ids, text=text)
    return list(prompts.values())


def logged_rollouts(rows: pa.Table, mu: Side, cluster_of: Callable[[str], str], texts: TokenTexts) -> pa.Table:
    """The rows of `rollouts.parquet`, with the ids that the log's side makes, and each token's text or id."""
    counts: dict[str, int] = {}
    ids = []
    for prompt_id in rows["prompt_id"].to_pylist():
        sample = counts.get(prompt_id, 0)
        counts[prompt_id] = sample + 1
        ids.append(mu.row_id(prompt_id, sample))
    columns: dict[str, Any] = {
        "id": ids,
        "prompt_id": rows["prompt_id"],
        "sampler": [mu.sampler] * rows.num_rows,
        "seed": [_NOT_SEEDED] * rows.num_rows,
        "prompt_token_ids": rows["prompt_token_ids"],
        "token_ids": rows["token_ids"],
        "token_texts": [[storable(text) for text in texts(token_ids)] for token_ids in rows["token_ids"].to_pylist()],
        "finish_reason": pc.fill_null(rows["finish_reason"], ""),
        "sampled": rows["mask"],
        "step": rows["step"],
        "weight_version": rows["weight_version"],
        "weight_versions": rows["weight_versions"],
        "where": rows["where"],
        "cluster": [cluster_of(prompt_id) for prompt_id in rows["prompt_id"].to_pylist()],
    }
    return pa.table(columns, schema=LOGGED_ROLLOUTS).combine_chunks()


def logged_legs(rows: pa.Table, ids: pa.ChunkedArray, of_sides: Mapping[str, str]) -> Iterator[tuple[str, pa.Table]]:
    """Each leg and its rows, from a column of the log; `of_sides` has the leg of each column (`log_mu`)."""
    prompts, responses = rows["prompt_token_ids"].to_pylist(), rows["token_ids"].to_pylist()
    keys = [ids_key(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    for column, leg in of_sides.items():
        yield leg, _logged_leg(rows, ids, pa.array(keys, type=pa.uint64()), column)


def _logged_leg(rows: pa.Table, ids: pa.ChunkedArray, keys: pa.Array, column: str) -> pa.Table:
    """The rows of a leg; a response without the column has NaN for each token."""
    logprobs = rows[COLUMN_NAMES[column]]
    if logprobs.null_count:
        lengths = pc.list_value_length(rows["token_ids"]).to_pylist()
        pairs = zip(logprobs.to_pylist(), lengths, strict=True)
        logprobs = pa.array(
            [[math.nan] * length if values is None else values for values, length in pairs], pa.list_(pa.float64())
        )
    columns: dict[str, Any] = {
        "id": ids,
        "ids_key": keys,
        "logprobs": logprobs,
    }
    if column == "log_pi":
        columns["entropy_nats"] = rows["entropy"]
    return leg_rows(columns, double=True)


@dataclass(frozen=True)
class Columns:
    """The columns of log-probs that a log records, at least in some steps."""

    has_mu: bool
    has_pi: bool
    has_ref: bool
    left_out: frozenset[int | None]
    """The steps that lack a column which other steps record."""
    copies: Mapping[str, CopiedRows]
    """The columns that were copied in some responses instead of recorded, and how to recognise such a response."""

    @classmethod
    def of(cls, census: Census, checks: LogChecks) -> "Columns":
        """Read the columns from the checks of a complete log."""
        missing_numbers = checks.missing_numbers()
        counts = {"log_mu": census.has_mu, "log_pi": census.has_pi, "log_ref": census.has_ref}
        empty = {name for name, why in missing_numbers.items() if why.steps is None}
        count = {name: num_present and name not in empty for name, num_present in counts.items()}
        steps = [why.steps for name, why in missing_numbers.items() if count.get(name) and why.steps is not None]
        return cls(
            has_mu=count["log_mu"],
            has_pi=count["log_pi"],
            has_ref=count["log_ref"],
            left_out=frozenset().union(*steps),
            copies={name: copies.rows for name, copies in checks.copies().items() if count[name]},
        )

    def of_recorded_steps(self, rows: pa.Table) -> pa.Table:
        """The rows of the steps that are not left out."""
        if not self.left_out:
            return rows
        excluded_steps = pa.array(sorted(self.left_out, key=str), type=pa.int64())
        return rows.filter(pc.invert(pc.is_in(rows["step"], value_set=excluded_steps))).combine_chunks()

    def without_copies(self, rows: pa.Table) -> pa.Table:
        """The same rows, where a copied column is null."""
        for column, copies in self.copies.items():
            name = COLUMN_NAMES[column]
            of_own = pa.array(_is_own_row(rows, name, copies), type=pa.bool_())
            own = pc.if_else(of_own, rows[name].combine_chunks(), pa.scalar(None, type=rows[name].type))
            rows = rows.set_column(rows.column_names.index(name), rows.field(name), own)
        return rows.combine_chunks()


def _is_own_row(rows: pa.Table, column: str, copies: CopiedRows) -> Iterator[bool]:
    for values, mu, mask in zip(*(rows[name] for name in (column, COLUMN_NAMES["log_mu"], "mask")), strict=True):
        if values.is_valid and mu.is_valid:
            is_sampled = mask.values.to_numpy(zero_copy_only=False)
            yield not is_copied(values.values.to_numpy()[is_sampled], mu.values.to_numpy()[is_sampled], copies)
        else:
            yield True


_TOKENS_A_FILE: Final = 1_000_000
_TOKENS_OF_A_SMALL_STEP: Final = 4096
_MOST_SMALL_STEPS: Final = 256
_SMALL_STEPS: Final = "small-steps"
_MOST_PENDING_TOKENS: Final = 4_000_000
"""The tokens of all steps together that wait in memory; a log whose steps are mixed is written in more files."""
_TOKENS_OF_A_RESPONSE: Final = 64
"""The memory of a response besides its tokens, counted in tokens: about 2.5 KiB."""
_CHARACTERS_OF_A_TOKEN: Final = 32


class Partitions:
    """`RUN/log/step-000003/00000.parquet`, or `RUN/log/no-step/...` where the log has no steps.

    Very many small steps that wait at the end share files in `RUN/log/small-steps/`: a file for each would take longer
    than everything else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[int | None, list[tuple[str, LoggedResponse]]] = {}
        self._tokens: dict[int | None, int] = {}
        self._pending_tokens = 0
        self._files: dict[str, int] = {}

    def add(self, prompt_id: str, response: LoggedResponse) -> None:
        step = response.step
        self._pending.setdefault(step, []).append((prompt_id, response))
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        self._tokens[step] = self._tokens.get(step, 0) + num_tokens
        self._pending_tokens += num_tokens + _size_without_tokens(response)
        if self._tokens[step] >= _TOKENS_A_FILE:
            self._write_steps([step], _folder_of_step(step))
        elif self._pending_tokens >= _MOST_PENDING_TOKENS:
            self.finish()

    def finish(self) -> None:
        """Write all waiting responses."""
        small = [step for step, num_tokens in self._tokens.items() if num_tokens < _TOKENS_OF_A_SMALL_STEP]
        if len(small) > _MOST_SMALL_STEPS:
            self._write_steps(small, _SMALL_STEPS)
        for step in list(self._pending):
            self._write_steps([step], _folder_of_step(step))

    def _write_steps(self, steps: Sequence[int | None], folder: str) -> None:
        in_order = sorted(steps, key=lambda step: -1 if step is None else step)
        prompt_ids, responses = zip(*(row for step in in_order for row in self._pending.pop(step)), strict=True)
        self._pending_tokens -= sum(self._tokens.pop(step) for step in steps) + sum(
            map(_size_without_tokens, responses)
        )
        number = self._files.get(folder, 0)
        self._files[folder] = number + 1
        write_table(self._folder / folder / f"{number:05d}.parquet", log_table(prompt_ids, responses))


def read_partitions(folder: Path) -> Iterator[pa.Table]:
    """The tables of a log, in the order of its steps."""
    for path in sorted(folder.glob("*/*.parquet")):
        yield read_table(path)


def _size_without_tokens(response: LoggedResponse) -> int:
    characters = len(response.where)
    for text in (response.weight_version, response.group, response.trajectory, response.finish_reason, response.model):
        if text is not None:
            characters += len(text)
    return _TOKENS_OF_A_RESPONSE + characters // _CHARACTERS_OF_A_TOKEN


def _folder_of_step(step: int | None) -> str:
    return "no-step" if step is None else f"step-{step:06d}"


CHOICES_LEG: Final = "choices"
_MOST_OF_A_STEP: Final = 128
_MOST_NUMBERS: Final = 2**24


class FirstChoices:
    """The recorded choices of the first responses of each step, as many as a small memory holds."""

    def __init__(self) -> None:
        self._responses: dict[str, LoggedResponse] = {}
        self._of_step: dict[int | None, int] = {}
        self._num_numbers = 0

    def add(self, response: LoggedResponse) -> None:
        if response.experts is None and response.kept is None:
            return
        number = self._of_step.get(response.step, 0)
        experts, kept = response.experts, response.kept
        size = (0 if experts is None else experts.size) + (0 if kept is None else kept.ids.size)
        if number < _MOST_OF_A_STEP and self._num_numbers + size <= _MOST_NUMBERS:
            self._responses[response.where] = response
            self._of_step[response.step] = number + 1
            self._num_numbers += size

    def table(self, rollouts: pa.Table) -> pa.Table:
        """A row for each of the rollouts whose choices are there."""
        places = zip(rollouts["id"].to_pylist(), rollouts["where"].to_pylist(), strict=True)
        rows = [(row_id, self._responses[where]) for row_id, where in places if where in self._responses]
        return choices_table([row_id for row_id, _ in rows], [response for _, response in rows])


PROMPT_FILE: Final = "prompts.jsonl"


def write_prompts(log_format: Format, source: Path, out_folder: Path, findings: list[LogFinding]) -> tuple[Path, int]:
    """Write each prompt of the log once into the new folder `out_folder`; returns the file and the number of prompts.

    Nothing is left on the disk where the log cannot be used.

    Raises:
        UsageError: the log cannot be read.
        RunDirectoryError: `out` is in use.
        StorageError: the disk refused.
    """
    folder, path, count = RunDirectory(out_folder), out_folder / PROMPT_FILE, 0
    with folder.create():
        try:
            with replacing(path) as file:
                for prompt in log_format.read_prompts(source, findings.append):
                    file.write(f"{json.dumps(prompt)}\n".encode())
                    count += 1
        except BaseException:
            folder.remove()
            raise
    return path, count
