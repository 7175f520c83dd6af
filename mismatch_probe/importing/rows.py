"""From the parquet files of a log to the responses and legs of a run."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from mismatch_probe.config.sides import Side
from mismatch_probe.importing.selection import Choice
from mismatch_probe.records.legs import COLUMN_NAMES
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.records.tables import ROLLOUTS, ids_key, leg_schema

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
    wanted = pa.array(sorted(chosen.prompt_ids))
    of_prompts = (table.filter(pc.is_in(table["prompt_id"], value_set=wanted)) for table in tables)
    is_whole = chosen.share >= 1
    return pa.concat_tables([table if is_whole else table.filter(_taken(table, chosen)) for table in of_prompts])


def _taken(table: pa.Table, chosen: Choice) -> pa.Array:
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
        given = zip(logprobs.to_pylist(), lengths, strict=True)
        logprobs = pa.array([[math.nan] * length if values is None else values for values, length in given], number)
    columns: dict[str, Any] = {
        "id": ids,
        "ids_key": keys,
        "logprobs": logprobs,
        "top1_ids": absent.cast(pa.list_(pa.int32())),
        "entropy_nats": rows["entropy"] if column == "log_pi" else absent.cast(pa.list_(pa.float32())),
        "start_logprobs": absent.cast(number),
    }
    return pa.table(columns, schema=leg_schema(double=True))
