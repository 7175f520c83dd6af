"""Which experts a mixture of experts chose for each token and how it weighed them, as a side recorded it.

Arrays are [L, T, K]: L layers that have experts, T tokens of a response with its prompt but without its last token,
which no pass computes for its own sake, K experts a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import ids_key

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
    sequences: Sequence[TokenSequence],
    layers: Sequence[int],
    experts: NDArray[np.int32],
    weights: NDArray[np.float32],
) -> list[SequenceRouting]:
    """Arrays of all sequences' tokens, one sequence after another, cut apart."""
    ends = list(accumulate(sequence.num_tokens - 1 for sequence in sequences))[:-1]
    parts = zip(sequences, np.split(experts, ends, axis=1), np.split(weights, ends, axis=1), strict=True)
    return [SequenceRouting(sequence.id, tuple(layers), chosen, weighed) for sequence, chosen, weighed in parts]


def routing_table(sequences: Sequence[TokenSequence], recorded: Sequence[SequenceRouting]) -> pa.Table:
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
        for sequence, choice in zip(sequences, recorded, strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=ROUTING)


def routing_of(table: pa.Table) -> list[SequenceRouting]:
    """The responses of a `routing_table`."""
    recorded = []
    for row in table.to_pylist():
        shape = (len(row["layers"]), -1, row["num_chosen"])
        experts = np.array(row["experts"], dtype=np.int32).reshape(shape)
        weights = np.array(row["weights"], dtype=np.float32).reshape(shape)
        recorded.append(SequenceRouting(row["id"], tuple(row["layers"]), experts, weights))
    return recorded
