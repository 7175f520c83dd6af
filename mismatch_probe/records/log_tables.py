"""The responses of a log as parquet, under `RUN/log/`: what `import` reads as its plain format, and any reader too."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from mismatch_probe.records.sequences import LoggedResponse

LOG: Final = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("weight_version", pa.string()),
        pa.field("temperature", pa.float64()),
        pa.field("finish_reason", pa.string()),
        pa.field("group", pa.string()),
        pa.field("model", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float64())),
        pa.field("train_logprobs", pa.list_(pa.float64())),
        pa.field("ref_logprobs", pa.list_(pa.float64())),
        pa.field("entropy", pa.list_(pa.float32())),
    ]
)
"""One row a response; log-probs in nats, one list a response, NaN where the log has no number for a token."""

COLUMN_NAMES: Final = {"log_mu": "logprobs", "log_pi": "train_logprobs", "log_ref": "ref_logprobs"}
"""Of the log-probs of a `LoggedResponse`, as the tables have them."""


def log_table(prompt_ids: Sequence[str], responses: Sequence[LoggedResponse]) -> pa.Table:
    """Rows of a log."""
    columns: dict[str, Any] = {
        "prompt_id": list(prompt_ids),
        "where": [response.where for response in responses],
        "step": [response.step for response in responses],
        "weight_version": [response.weight_version for response in responses],
        "temperature": [response.temperature for response in responses],
        "finish_reason": [response.finish_reason for response in responses],
        "group": [response.group for response in responses],
        "model": [response.model for response in responses],
        "prompt_token_ids": _lists([response.prompt_token_ids for response in responses], np.int32),
        "token_ids": _lists([response.token_ids for response in responses], np.int32),
        "mask": _lists([response.sampled for response in responses], np.bool_),
        "logprobs": _lists([response.log_mu for response in responses], np.float64),
        "train_logprobs": _lists([response.log_pi for response in responses], np.float64),
        "ref_logprobs": _lists([response.log_ref for response in responses], np.float64),
        "entropy": _lists([response.entropy_nats for response in responses], np.float32),
    }
    return pa.table(columns, schema=LOG)


def _lists(arrays: Sequence[Any], kind: type[np.generic]) -> pa.ListArray:
    """One list an array, null for None."""
    absent = np.asarray([array is None for array in arrays], dtype=bool)
    there = [np.asarray([] if array is None else array, dtype=kind) for array in arrays]
    ends = np.concatenate([[0], np.cumsum([array.size for array in there])]).astype(np.int32)
    values = pa.array(np.concatenate([*there, np.zeros(0, dtype=kind)]))
    return pa.ListArray.from_arrays(pa.array(ends), values, mask=pa.array(absent))
