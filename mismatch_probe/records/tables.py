"""The parquet files of a run: schemas, rows, reading and writing; and the sums of errors at every place."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatch_probe.errors import BrokenRecord, message_of
from mismatch_probe.reading import flat, nest_names, storable
from mismatch_probe.records.activations import ErrorSums, Floats, OwnSums, PlaceSums, RouterSums, SideSums
from mismatch_probe.records.digests import require_own_digests, with_digests
from mismatch_probe.records.files import go_on, open_to_read, replacing
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    PromptImages,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
    leg_columns,
)

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("answer", pa.string()),
    ]
)
IMAGES = pa.field("images", pa.string())
"""The column that a file of prompts has where any prompt holds images, each as JSON."""

ROLLOUTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sampler", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_texts", pa.list_(pa.string()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)


def leg_schema(*, double: bool = False) -> pa.Schema:
    """A leg's columns; log-probs in nats, one list a response. `double` for an FP64 reference.

    `ids_key` is the hash of the token ids that were really scored, so that a leg of other ids is detected.
    """
    number = pa.float64() if double else pa.float32()
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("ids_key", pa.uint64(), nullable=False),
            pa.field("logprobs", pa.list_(number), nullable=False),
            *(
                pa.field(name, pa.list_(number if column.number is None else pa.from_numpy_dtype(column.number)))
                for name, column in leg_columns().items()
            ),
        ]
    )


DISTRIBUTIONS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ]
)
"""A policy's log-probs of the whole vocabulary in nats, one row a response position."""

FULL_VOCABULARY = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("positions", pa.list_(pa.int32()), nullable=False),
        pa.field("full_kl", pa.list_(pa.float64()), nullable=False),
        pa.field("full_tv", pa.list_(pa.float64()), nullable=False),
        pa.field("diff", pa.list_(pa.float64()), nullable=False),
    ]
)
"""Exact KL(mu || pi), total variation and the sampled token's d in nats at some positions, one row a response."""


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table whole or not at all, a sealed one with its digests; the same table gives the same bytes."""
    float_leaves, other_leaves = [], []
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        leaf = f"{field.name}.list.element" if is_list else field.name
        kind = field.type.value_type if is_list else field.type
        if pa.types.is_floating(kind):
            float_leaves.append(leaf)
        else:
            other_leaves.append(leaf)
    table = with_digests(table)
    with replacing(path) as file:
        pq.write_table(
            table, file, compression="zstd", use_dictionary=other_leaves, use_byte_stream_split=float_leaves or False
        )


def with_rows(old: pa.Table, new: pa.Table) -> pa.Table:
    """`old` and `new` behind it; a row of `old` whose id `new` has too gives way."""
    others = old.filter(pc.invert(pc.is_in(old["id"], value_set=new["id"].combine_chunks())))
    return pa.concat_tables([others, new], promote_options="default").combine_chunks()


def read_rows(path: Path, *schemas: pa.Schema) -> pa.Table:
    """A table of one of the schemas; columns that may be null may be absent too.

    Raises:
        BrokenRecord: the file is missing, truncated or not parquet; it lacks a column, holds one of another type, or
            has two rows of one id.
    """
    table = read_table(path)
    if not any(all(map(partial(_has, table), schema)) for schema in schemas):
        columns = ", ".join(field.name for field in schemas[0] if not field.nullable)
        raise BrokenRecord(
            f"{path} does not hold the columns {columns} in their types: it is damaged, or another file; "
            f"remove it and {go_on(path)}"
        )
    if len(pc.unique(table["id"])) < table.num_rows:
        raise BrokenRecord(
            f"{path} has several rows of one response, and which counts is open: remove it and {go_on(path)}"
        )
    return table


def _has(table: pa.Table, field: pa.Field) -> bool:
    place = table.schema.get_field_index(field.name)
    return bool(field.nullable if place < 0 else table.schema.field(place).type == field.type)


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read a table of a run, or some of its columns.

    Raises:
        BrokenRecord: the file is missing, truncated, not parquet, or no regular file, it lacks a column, or a column is
            not the one that its digest is of.
    """
    try:
        with open_to_read(path) as file, pq.ParquetFile(file) as parquet:
            table = parquet.read(columns)
    except FileNotFoundError as error:
        raise BrokenRecord(f"{path} is missing: the run is unfinished; {go_on(path)}") from error
    except (pa.ArrowInvalid, pa.ArrowException, OSError) as error:
        raise BrokenRecord(
            f"{path} cannot be read ({message_of(error)}): it is truncated or not parquet; remove it and {go_on(path)}"
        ) from error
    if missing := sorted(set(columns or ()).difference(table.column_names)):
        raise BrokenRecord(
            f"{path} does not hold {', '.join(missing)}: it is another file; remove it and {go_on(path)}"
        )
    require_own_digests(path, table)
    return table


def prompts_table(prompts: Sequence[EncodedPrompt]) -> pa.Table:
    columns = {
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "prompt_token_ids": [prompt.token_ids for prompt in prompts],
        "text": [storable(prompt.text) for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
    }
    if not any(prompt.images for prompt in prompts):
        return pa.table(columns, schema=PROMPTS)
    images = [None if prompt.images is None else json.dumps(asdict(prompt.images)) for prompt in prompts]
    return pa.table(columns | {"images": images}, schema=PROMPTS.append(IMAGES))


def prompts_of(table: pa.Table) -> list[EncodedPrompt]:
    return [
        EncodedPrompt(row["prompt_id"], row["prompt_token_ids"], row["text"], row["answer"], _images(row.get("images")))
        for row in table.to_pylist()
    ]


def _images(text: str | None) -> PromptImages | None:
    return None if text is None else PromptImages(**json.loads(text))


def rollouts_table(requests: Sequence[SampleRequest], responses: Sequence[SampledSequence], sampler: str) -> pa.Table:
    """Rows of `rollouts.parquet`, in request order."""
    return pa.table(
        {
            "id": [request.id for request in requests],
            "prompt_id": [request.prompt.prompt_id for request in requests],
            "sampler": [sampler] * len(requests),
            "seed": [request.seed for request in requests],
            "prompt_token_ids": [request.prompt.token_ids for request in requests],
            "token_ids": [sample.sequence.token_ids for sample in responses],
            "token_texts": [[storable(text) for text in sample.token_texts] for sample in responses],
            "finish_reason": [sample.finish_reason for sample in responses],
        },
        schema=ROLLOUTS,
    )


def sequences_of(table: pa.Table, prompts: Sequence[EncodedPrompt] = ()) -> list[TokenSequence]:
    """The responses of a table, with the images of those `prompts` that hold any."""
    images = {prompt.prompt_id: prompt.images for prompt in prompts if prompt.images is not None}
    names = table["prompt_id"].to_pylist() if images else [""] * table.num_rows
    columns = table.select(["id", "prompt_token_ids", "token_ids"]).to_pydict()
    rows = zip(columns["id"], columns["prompt_token_ids"], columns["token_ids"], map(images.get, names), strict=True)
    return [TokenSequence(*row) for row in rows]


def ids_key(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """64-bit hash of a prompt's and a response's token ids, and of where one ends and the other begins."""
    digest = hashlib.blake2b(len(prompt_token_ids).to_bytes(8, "little"), digest_size=8)
    digest.update(np.asarray([*prompt_token_ids, *token_ids], dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def leg_table(
    sequences: Sequence[TokenSequence], scores: Sequence[ScoredSequence], *, double: bool = False
) -> pa.Table:
    """Rows of a leg: the sequences that were scored and their scores; `double` keeps FP64 log-probs.

    Raises:
        BrokenRecord: a score belongs to another sequence or has another length.
    """
    for sequence, score in zip(sequences, scores, strict=True):
        if sequence.id != score.id or len(sequence.token_ids) != len(score.logprobs):
            raise BrokenRecord(
                f"asked for {len(sequence.token_ids)} log-probs of {sequence.id}, "
                f"got {len(score.logprobs)} of {score.id}"
            )
    number = np.float64 if double else np.float32
    return pa.table(
        {
            "id": [score.id for score in scores],
            "ids_key": [ids_key(sequence.prompt_token_ids, sequence.token_ids) for sequence in sequences],
            "logprobs": [np.asarray(score.logprobs, dtype=number) for score in scores],
            **{
                name: [_numbers(getattr(score, name), column.number or number) for score in scores]
                for name, column in leg_columns().items()
            },
        },
        schema=leg_schema(double=double),
    )


def leg_rows(columns: Mapping[str, Any], *, double: bool = False) -> pa.Table:
    """Rows of a leg from its columns by name; a column that may be null is null where it is absent."""
    schema = leg_schema(double=double)
    absent = {field.name: pa.nulls(len(columns["id"]), field.type) for field in schema if field.nullable}
    return pa.table({**absent, **columns}, schema=schema)


def in_order(table: pa.Table, ids: Sequence[str]) -> pa.Table:
    """The table's rows in the order of `ids`.

    Raises:
        KeyError: an id has no row.
    """
    positions = {row_id: position for position, row_id in enumerate(table["id"].to_pylist())}
    return table.take(pa.array([positions[row_id] for row_id in ids], type=pa.int64())).combine_chunks()


def _numbers(values: npt.NDArray[Any] | None, kind: type[np.number]) -> npt.NDArray[Any] | None:
    return None if values is None else np.asarray(values, dtype=kind)


def write_sums(path: Path, places: list[PlaceSums], routers: list[RouterSums]) -> None:
    """Write everything as one npz file, whole or not at all."""
    tables = {f"places.{number}": asdict(place) for number, place in enumerate(places)}
    tables |= {f"routers.{number}": asdict(router) for number, router in enumerate(routers)}
    arrays = {name: np.asarray(-1 if value is None else value) for name, value in flat(tables)}
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_sums(path: Path) -> tuple[list[PlaceSums], list[RouterSums]]:
    with np.load(path, allow_pickle=False) as arrays:
        tables = nest_names({name: arrays[name] for name in arrays.files})
    places, routers = (list(tables.get(kind, {}).values()) for kind in ("places", "routers"))
    return [_place(**place) for place in places], [
        RouterSums(**{**router, "layer": int(router["layer"])}) for router in routers
    ]


def _place(layer: Floats, place: Floats, between: dict[str, Floats], **sides: dict[str, Any]) -> PlaceSums:
    infer, train = (_side(**sides[side]) for side in ("infer", "train"))
    return PlaceSums(None if layer < 0 else int(layer), str(place), infer, train, ErrorSums(**between))


def _side(
    total: dict[str, Floats], own: dict[str, Floats], own_by_number: dict[str, Floats], between_parts: dict[str, Floats]
) -> SideSums:
    return SideSums(ErrorSums(**total), ErrorSums(**own), OwnSums(**own_by_number), OwnSums(**between_parts))
