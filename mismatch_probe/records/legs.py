"""The legs, rollouts, prompts and logged responses of a run, and the experts that a side chose.

Each file names its run and what it is, so that a file of another run is refused, and has digests, so that an edited
one is.

Arrays are [L, T, K]: L layers that have experts, T tokens of a response with its prompt but without its last token,
which no pass computes for its own sake, K experts a token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.digests import has_digests, is_sealed, seal, seals_prompts
from mismatch_probe.records.files import go_on
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import EncodedPrompt, KeptSets, LoggedResponse, TokenSequence
from mismatch_probe.records.tables import ids_key, prompts_table, read_rows, read_table, write_table

_ROLLOUTS: Final = "rollouts"
_PROMPTS: Final = "prompts"
_LEG: Final = b"mismatch_probe.leg"
_RUN: Final = b"mismatch_probe.run"


class Legs:
    """`run_key` is that of the run's manifest; empty in a run made before legs recorded their run."""

    def __init__(self, run: RunDirectory, run_key: str) -> None:
        self._run = run
        self._key = run_key

    @property
    def are_identified(self) -> bool:
        return bool(self._key)

    def path(self, name: str) -> Path:
        return self._run.leg_path(name)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a leg whole or not at all."""
        write_table(self.path(name), _with_label(table, name, self._key))

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """
        Raises:
            BrokenRecord: the file is missing, cannot be read, or says that it is another leg, or another run's.
        """
        return self._own(name, read_table(self.path(name), columns))

    def read_rows(self, name: str, *schemas: pa.Schema) -> pa.Table:
        """A leg of one of the schemas. Raises as `read`, and as `tables.read_rows`."""
        return self._own(name, read_rows(self.path(name), *schemas))

    def _own(self, name: str, table: pa.Table) -> pa.Table:
        labels = {key: value for key, value in (table.schema.metadata or {}).items() if key in (_LEG, _RUN)}
        if labels == _identity(name, self._key):
            require_sealed(self.path(name), table, self._key)
            return table
        leg, run = (labels.get(key, b"").decode(errors="replace") for key in (_LEG, _RUN))
        if not labels:
            what = "does not say which leg of which run it is, as every leg of this run does"
        elif leg != name:
            what = f"is the leg {leg}, not {name}"
        else:
            what = f"is the leg {name} of another run ({run})"
        raise BrokenRecord(
            f"{self.path(name)} {what}: nothing is concluded from it; put the run's own file back, or remove it and "
            f"{go_on(self.path(name))}"
        )


def write_rollouts(run: RunDirectory, run_key: str, rollouts: pa.Table) -> None:
    """Write `rollouts.parquet` whole or not at all."""
    write_table(run.rollouts_path, _with_label(rollouts, _ROLLOUTS, run_key) if is_sealed(run_key) else rollouts)


def require_own_rollouts(run: RunDirectory, run_key: str, rollouts: pa.Table) -> None:
    """What was read from `rollouts.parquet` is this run's.

    Raises:
        BrokenRecord: it says that it is another file, or another run's, or has no digests where it should.
    """
    if is_sealed(run_key):
        _require_own(run.rollouts_path, rollouts, _ROLLOUTS, run_key)


def write_prompts(run: RunDirectory, run_key: str, prompts: Sequence[EncodedPrompt]) -> None:
    """Write `prompts.parquet` whole or not at all."""
    table = prompts_table(prompts)
    write_table(run.prompts_path, _with_label(table, _PROMPTS, run_key) if seals_prompts(run_key) else table)


def read_prompts(run: RunDirectory, run_key: str, columns: list[str] | None = None) -> pa.Table:
    """What `prompts.parquet` holds, or some of its columns.

    Raises:
        BrokenRecord: the file is missing, cannot be read or was edited, it says that it is another file, or another
            run's, or has no digests where it should.
    """
    table = read_table(run.prompts_path, columns)
    if seals_prompts(run_key):
        _require_own(run.prompts_path, table, _PROMPTS, run_key)
    return table


def _require_own(path: Path, table: pa.Table, name: str, run_key: str) -> None:
    require_sealed(path, table, run_key)
    label = {key: value for key, value in (table.schema.metadata or {}).items() if key in (_LEG, _RUN)}
    if label != _identity(name, run_key):
        raise BrokenRecord(f"{path} is a file of another run: nothing is concluded from it; put the run's own back")


def require_sealed(path: Path, table: pa.Table, run_key: str) -> None:
    """
    Raises:
        BrokenRecord: it has no digests, and the tables of this run have.
    """
    if is_sealed(run_key) and not has_digests(table):
        raise BrokenRecord(
            f"{path} has no digests, as every table of this run has: another program wrote it; put the run's own file "
            "back, or make the run again"
        )


def _with_label(table: pa.Table, name: str, run_key: str) -> pa.Table:
    identity = _identity(name, run_key)
    return seal(table, identity) if is_sealed(run_key) else table.replace_schema_metadata(identity or None)


def _identity(name: str, run_key: str) -> dict[bytes, bytes]:
    return {_LEG: name.encode(), _RUN: run_key.encode()} if run_key else {}


def versions_of_tokens(spans: Iterable[tuple[str, int]] | None) -> list[str] | None:
    """The version of the weights of each token, as the tables have it, of `LoggedResponse.weight_spans`."""
    if spans is None:
        return None
    versions: list[str] = []
    for version, end in spans:
        versions += [version] * (end - len(versions))
    return versions


def spans_of_tokens(versions: Sequence[str] | None) -> tuple[tuple[str, int], ...] | None:
    """The reverse of `versions_of_tokens`."""
    if versions is None:
        return None
    ends = [place for place in range(1, len(versions)) if versions[place] != versions[place - 1]]
    return tuple((versions[end - 1], end) for end in (*ends, len(versions)))


LOG: Final = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
        pa.field("step", pa.int64()),
        pa.field("weight_version", pa.string()),
        pa.field("weight_versions", pa.list_(pa.string())),
        pa.field("temperature", pa.float64()),
        pa.field("finish_reason", pa.string()),
        pa.field("group", pa.string()),
        pa.field("trajectory", pa.string()),
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
        "weight_versions": [versions_of_tokens(response.weight_spans) for response in responses],
        "temperature": [response.temperature for response in responses],
        "finish_reason": [response.finish_reason for response in responses],
        "group": [response.group for response in responses],
        "trajectory": [response.trajectory for response in responses],
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
    present_rows = [np.asarray([] if array is None else array, dtype=kind) for array in arrays]
    ends = np.concatenate([[0], np.cumsum([array.size for array in present_rows])]).astype(np.int32)
    values = pa.array(np.concatenate([*present_rows, np.zeros(0, dtype=kind)]))
    return pa.ListArray.from_arrays(pa.array(ends), values, mask=pa.array(absent))


ROUTING: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("ids_key", pa.uint64(), nullable=False),
        pa.field("layers", pa.list_(pa.int32()), nullable=False),
        pa.field("num_chosen", pa.int32(), nullable=False),
        pa.field("experts", pa.list_(pa.int32()), nullable=False),
        pa.field("weights", pa.list_(pa.float32()), nullable=False),
    ]
)


@dataclass(frozen=True)
class SequenceRouting:
    """One response: ids and weights of its tokens' experts [L, T, K], in the order the side gave them."""

    id: str
    layers: tuple[int, ...]
    experts: NDArray[np.int32]
    weights: NDArray[np.float32]


def by_sequence(
    sequences: Sequence[TokenSequence], layers: Sequence[int], experts: NDArray[np.int32], weights: NDArray[np.float32]
) -> list[SequenceRouting]:
    """Arrays of all sequences' tokens, one sequence after another, split into one array a sequence."""
    ends = list(accumulate(sequence.num_tokens - 1 for sequence in sequences))[:-1]
    parts = zip(sequences, np.split(experts, ends, axis=1), np.split(weights, ends, axis=1), strict=True)
    return [
        SequenceRouting(sequence.id, tuple(layers), experts_of_sequence, routing_weights)
        for sequence, experts_of_sequence, routing_weights in parts
    ]


def routing_table(sequences: Sequence[TokenSequence], routing: Sequence[SequenceRouting]) -> pa.Table:
    """A row a response, in the order of both."""
    rows: list[dict[str, Any]] = [
        {
            "id": choice.id,
            "ids_key": ids_key(sequence.prompt_token_ids, sequence.token_ids),
            "layers": list(choice.layers),
            "num_chosen": choice.experts.shape[2],
            "experts": choice.experts.ravel(),
            "weights": choice.weights.ravel(),
        }
        for sequence, choice in zip(sequences, routing, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=ROUTING)


def routing_of(table: pa.Table) -> list[SequenceRouting]:
    """The responses of a `routing_table`."""
    sequences = []
    for row in table.to_pylist():
        shape = (len(row["layers"]), -1, row["num_chosen"])
        experts = np.array(row["experts"], dtype=np.int32).reshape(shape)
        weights = np.array(row["weights"], dtype=np.float32).reshape(shape)
        sequences.append(SequenceRouting(row["id"], tuple(row["layers"]), experts, weights))
    return sequences


CHOICES: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("ids_key", pa.uint64(), nullable=False),
        pa.field("num_layers", pa.int32(), nullable=False),
        pa.field("num_chosen", pa.int32(), nullable=False),
        pa.field("experts", pa.list_(pa.int32())),
        pa.field("kept_ids", pa.list_(pa.int32())),
        pa.field("kept_ends", pa.list_(pa.int64())),
    ]
)
"""What the engine of a log chose besides tokens, of a few responses: null where it is not recorded."""


def choices_table(ids: Sequence[str], responses: Sequence[LoggedResponse]) -> pa.Table:
    """A row a response."""
    rows: list[dict[str, Any]] = []
    for row_id, response in zip(ids, responses, strict=True):
        experts, kept = response.experts, response.kept
        rows.append(
            {
                "id": row_id,
                "ids_key": ids_key(response.prompt_token_ids.tolist(), response.token_ids.tolist()),
                "num_layers": 0 if experts is None else experts.shape[1],
                "num_chosen": 0 if experts is None else experts.shape[2],
                "experts": None if experts is None else experts.ravel(),
                "kept_ids": None if kept is None else kept.ids,
                "kept_ends": None if kept is None else kept.ends,
            }
        )
    return pa.Table.from_pylist(rows, schema=CHOICES)


def with_choices(response: LoggedResponse, row: Mapping[str, Any]) -> LoggedResponse:
    """The response with what a row of a `choices_table` says of it."""
    experts, kept_ids = row["experts"], row["kept_ids"]
    return replace(
        response,
        experts=None
        if experts is None
        else np.array(experts, np.int32).reshape(-1, row["num_layers"], row["num_chosen"]),
        kept=None if kept_ids is None else KeptSets(np.array(kept_ids, np.int32), np.array(row["kept_ends"], np.int64)),
    )
