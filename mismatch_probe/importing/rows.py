"""Between a log's rows and files: the parquet of a run, one folder a step, and a prompt file."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.config.sides import Side
from mismatch_probe.importing.selection import Census, Choice
from mismatch_probe.logs import Format, LogChecks, LogFinding, is_copied
from mismatch_probe.records.atomic import replacing
from mismatch_probe.records.legs import COLUMN_NAMES, log_table
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt, LoggedResponse
from mismatch_probe.records.tables import ROLLOUTS, ids_key, leg_schema, read_table, write_table
from mismatch_probe.stats.copies import CopiedRows

LOGGED_ROLLOUTS: Final = pa.schema(
    [
        *ROLLOUTS,
        pa.field("sampled", pa.list_(pa.bool_()), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("weight_version", pa.string()),
        pa.field("where", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
    ]
)
"""Of an imported run: which tokens the policy sampled, where each response comes from, and what it is not independent
of.
"""

_NOT_SEEDED: Final = -1


def chosen_rows(tables: Iterable[pa.Table], chosen: Choice) -> pa.Table:
    """The rows that were chosen."""
    prompt_ids = pa.array(sorted(chosen.prompt_ids))
    of_prompts = (table.filter(pc.is_in(table["prompt_id"], value_set=prompt_ids)) for table in tables)
    takes_all = chosen.share >= 1
    return pa.concat_tables([table if takes_all else table.filter(_selected(table, chosen)) for table in of_prompts])


def _selected(table: pa.Table, chosen: Choice) -> pa.Array:
    return pa.array([chosen.takes(where) for where in table["where"].to_pylist()], type=pa.bool_())


def sampled_tokens_of(tables: Iterable[pa.Table]) -> dict[str, int]:
    """How many sampled tokens the responses to each prompt have."""
    num_tokens: dict[str, int] = {}
    for table in tables:
        masks = table["mask"].to_pylist()
        for prompt_id, mask in zip(table["prompt_id"].to_pylist(), masks, strict=True):
            num_tokens[prompt_id] = num_tokens.get(prompt_id, 0) + sum(mask)
    return num_tokens


def prompts_in(rows: pa.Table) -> list[EncodedPrompt]:
    """Each prompt once, in the order of the log; no text is known."""
    prompts: dict[str, EncodedPrompt] = {}
    for prompt_id, token_ids in zip(
        *(rows[name].to_pylist() for name in ("prompt_id", "prompt_token_ids")), strict=True
    ):
        prompts.setdefault(prompt_id, EncodedPrompt(prompt_id, token_ids, text=""))
    return list(prompts.values())


def logged_rollouts(rows: pa.Table, mu: Side, cluster_of: Callable[[str], str]) -> pa.Table:
    """Rows of `rollouts.parquet`, with the ids that the side of the log makes."""
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
        "token_texts": [[f"<id {ids}>" for ids in token_ids] for token_ids in rows["token_ids"].to_pylist()],
        "finish_reason": pc.fill_null(rows["finish_reason"], ""),
        "sampled": rows["mask"],
        "step": rows["step"],
        "weight_version": rows["weight_version"],
        "where": rows["where"],
        "cluster": [cluster_of(prompt_id) for prompt_id in rows["prompt_id"].to_pylist()],
    }
    return pa.table(columns, schema=LOGGED_ROLLOUTS).combine_chunks()


def logged_legs(rows: pa.Table, ids: pa.ChunkedArray, of_sides: Mapping[str, str]) -> Iterator[tuple[str, pa.Table]]:
    """Each leg and its rows, from a column of the log; of_sides: the leg of each column (`log_mu`)."""
    prompts, responses = rows["prompt_token_ids"].to_pylist(), rows["token_ids"].to_pylist()
    keys = [ids_key(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    for column, leg in of_sides.items():
        yield leg, _logged_leg(rows, ids, pa.array(keys, type=pa.uint64()), column)


def _logged_leg(rows: pa.Table, ids: pa.ChunkedArray, keys: pa.Array, column: str) -> pa.Table:
    """A response without the column has no log-prob: NaN for each token."""
    number, absent = pa.list_(pa.float64()), pa.nulls(rows.num_rows)
    logprobs = rows[COLUMN_NAMES[column]]
    if logprobs.null_count:
        lengths = pc.list_value_length(rows["token_ids"]).to_pylist()
        pairs = zip(logprobs.to_pylist(), lengths, strict=True)
        logprobs = pa.array([[math.nan] * length if values is None else values for values, length in pairs], number)
    columns: dict[str, Any] = {
        "id": ids,
        "ids_key": keys,
        "logprobs": logprobs,
        "top1_ids": absent.cast(pa.list_(pa.int32())),
        "entropy_nats": rows["entropy"] if column == "log_pi" else absent.cast(pa.list_(pa.float32())),
        "start_logprobs": absent.cast(number),
    }
    return pa.table(columns, schema=leg_schema(double=True))


@dataclass(frozen=True)
class Columns:
    """has_mu, has_pi, has_ref: the column is recorded, at least in some steps. left_out: steps in which one that counts
    is not. copies: columns that were not recorded in some responses, but copied there, with what tells these.
    """

    has_mu: bool
    has_pi: bool
    has_ref: bool
    left_out: frozenset[int | None]
    copies: Mapping[str, CopiedRows]

    @classmethod
    def of(cls, census: Census, checks: LogChecks) -> "Columns":
        """What the checks of a whole log say of them."""
        unrecorded = checks.unrecorded()
        counts = {"log_mu": census.has_mu, "log_pi": census.has_pi, "log_ref": census.has_ref}
        empty = {name for name, why in unrecorded.items() if why.steps is None}
        count = {name: num_present and name not in empty for name, num_present in counts.items()}
        steps = [why.steps for name, why in unrecorded.items() if count.get(name) and why.steps is not None]
        return cls(
            has_mu=count["log_mu"],
            has_pi=count["log_pi"],
            has_ref=count["log_ref"],
            left_out=frozenset().union(*steps),
            copies={name: copies.rows for name, copies in checks.copies().items() if count[name]},
        )

    def of_recorded_steps(self, rows: pa.Table) -> pa.Table:
        """The rows of the other steps than those left out."""
        if not self.left_out:
            return rows
        excluded = pa.array(sorted(self.left_out, key=str), type=pa.int64())
        return rows.filter(pc.invert(pc.is_in(rows["step"], value_set=excluded))).combine_chunks()

    def without_copies(self, rows: pa.Table) -> pa.Table:
        """The same rows, of which those that are copies have none of the column that was copied."""
        for column, copies in self.copies.items():
            name = COLUMN_NAMES[column]
            of_own = pa.array(_not_copied(rows, name, copies), type=pa.bool_())
            own = pc.if_else(of_own, rows[name].combine_chunks(), pa.scalar(None, type=rows[name].type))
            rows = rows.set_column(rows.column_names.index(name), rows.field(name), own)
        return rows.combine_chunks()


def _not_copied(rows: pa.Table, column: str, copies: CopiedRows) -> Iterator[bool]:
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
        self._pending: dict[int | None, list[tuple[str, LoggedResponse]]] = {}
        self._tokens: dict[int | None, int] = {}
        self._num_held = 0
        self._files: dict[str, int] = {}

    def add(self, prompt_id: str, response: LoggedResponse) -> None:
        """
        Raises:
            StorageError: the disk refused.
        """
        step = response.step
        self._pending.setdefault(step, []).append((prompt_id, response))
        num_tokens = response.prompt_token_ids.size + response.token_ids.size
        self._tokens[step] = self._tokens.get(step, 0) + num_tokens
        self._num_held += num_tokens + _beside_tokens(response)
        if self._tokens[step] >= _TOKENS_A_FILE:
            self._write([step], _name(step))
        elif self._num_held >= _TOKENS_HELD:
            self.finish()

    def finish(self) -> None:
        """Write what waits. Raises as `add`."""
        small = [step for step, num_tokens in self._tokens.items() if num_tokens < _TOKENS_OF_A_SMALL_STEP]
        if len(small) > _MOST_SMALL_STEPS:
            self._write(small, _SMALL_STEPS)
        for step in list(self._pending):
            self._write([step], _name(step))

    def _write(self, steps: Sequence[int | None], folder: str) -> None:
        in_order = sorted(steps, key=lambda step: -1 if step is None else step)
        prompt_ids, responses = zip(*(row for step in in_order for row in self._pending.pop(step)), strict=True)
        self._num_held -= sum(self._tokens.pop(step) for step in steps) + sum(map(_beside_tokens, responses))
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


PROMPT_FILE: Final = "prompts.jsonl"


def write_prompts(log_format: Format, source: Path, out_folder: Path, findings: list[LogFinding]) -> tuple[Path, int]:
    """Write each prompt of the log once into the new folder `out`; returns the file and how many there are.

    Nothing stays behind where the log cannot be used.

    Raises:
        UsageError: the log cannot be read.
        RunDirectoryError: `out` is in use.
        StorageError: the disk refused.
    """
    folder, path, count = RunDirectory(out_folder), out_folder / PROMPT_FILE, 0
    with folder.created():
        try:
            with replacing(path) as file:
                for prompt in log_format.read_prompts(source, findings.append):
                    file.write(f"{json.dumps(prompt)}\n".encode())
                    count += 1
        except BaseException:
            folder.remove()
            raise
    return path, count
