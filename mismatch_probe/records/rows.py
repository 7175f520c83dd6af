"""Between the sequences that stages pass on and the rows of parquet files."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.reading import storable
from mismatch_probe.records.sequences import (
    EncodedPrompt,
    FloatArray,
    SampledSequence,
    SampleRequest,
    ScoredSequence,
    TokenSequence,
)
from mismatch_probe.records.tables import PROMPTS, ROLLOUTS, leg_schema


def prompts_table(prompts: Sequence[EncodedPrompt]) -> pa.Table:
    return pa.table(
        {
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "prompt_token_ids": [prompt.token_ids for prompt in prompts],
            "text": [storable(prompt.text) for prompt in prompts],
            "answer": [prompt.answer for prompt in prompts],
        },
        schema=PROMPTS,
    )


def prompts_of(table: pa.Table) -> list[EncodedPrompt]:
    return [
        EncodedPrompt(row["prompt_id"], row["prompt_token_ids"], row["text"], row["answer"])
        for row in table.to_pylist()
    ]


def rollouts_table(requests: Sequence[SampleRequest], sampled: Sequence[SampledSequence], sampler: str) -> pa.Table:
    """Rows of `rollouts.parquet`, in request order."""
    return pa.table(
        {
            "id": [request.id for request in requests],
            "prompt_id": [request.prompt.prompt_id for request in requests],
            "sampler": [sampler] * len(requests),
            "seed": [request.seed for request in requests],
            "prompt_token_ids": [request.prompt.token_ids for request in requests],
            "token_ids": [sample.sequence.token_ids for sample in sampled],
            "token_texts": [[storable(text) for text in sample.token_texts] for sample in sampled],
            "finish_reason": [sample.finish_reason for sample in sampled],
        },
        schema=ROLLOUTS,
    )


def sequences_of(table: pa.Table) -> list[TokenSequence]:
    columns = table.select(["id", "prompt_token_ids", "token_ids"]).to_pydict()
    return [
        TokenSequence(*row)
        for row in zip(columns["id"], columns["prompt_token_ids"], columns["token_ids"], strict=True)
    ]


def ids_key(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """64-bit hash of a prompt's and a response's token ids, and of where one ends and the other begins."""
    digest = hashlib.blake2b(len(prompt_token_ids).to_bytes(8, "little"), digest_size=8)
    digest.update(np.asarray([*prompt_token_ids, *token_ids], dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


def leg_table(
    sequences: Sequence[TokenSequence], scored: Sequence[ScoredSequence], *, double: bool = False
) -> pa.Table:
    """Rows of a leg: the sequences that were scored and their scores; `double` keeps FP64 log-probs.

    Raises:
        BrokenRecord: a score belongs to another sequence or has another length.
    """
    for sequence, score in zip(sequences, scored, strict=True):
        if sequence.id != score.id or len(sequence.token_ids) != len(score.logprobs):
            raise BrokenRecord(
                f"asked for {len(sequence.token_ids)} log-probs of {sequence.id}, "
                f"got {len(score.logprobs)} of {score.id}"
            )
    number = np.float64 if double else np.float32
    return pa.table(
        {
            "id": [score.id for score in scored],
            "ids_key": [ids_key(sequence.prompt_token_ids, sequence.token_ids) for sequence in sequences],
            "logprobs": [np.asarray(score.logprobs, dtype=number) for score in scored],
            "top1_ids": [score.top1_ids for score in scored],
            "entropy_nats": [_numbers(score.entropy_nats, np.float32) for score in scored],
            "start_logprobs": [_numbers(score.start_logprobs, number) for score in scored],
        },
        schema=leg_schema(double=double),
    )


def in_order(table: pa.Table, ids: Sequence[str]) -> pa.Table:
    """The table's rows in the order of `ids`.

    Raises:
        KeyError: an id has no row.
    """
    positions = {row_id: position for position, row_id in enumerate(table["id"].to_pylist())}
    return table.take(pa.array([positions[row_id] for row_id in ids], type=pa.int64())).combine_chunks()


def _numbers(values: FloatArray | None, kind: type[np.floating]) -> FloatArray | None:
    return None if values is None else np.asarray(values, dtype=kind)
