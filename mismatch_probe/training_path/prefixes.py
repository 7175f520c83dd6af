"""Sequences that begin alike, laid out so that every state is computed once.

In a causal model the state at a position follows from the tokens up to it. So one forward pass over the distinct
prefixes of a batch, a prompt's among its samples foremost, gives what a pass over all of its sequences would. Only
attention needs whole sequences; `shared_attention` puts them together there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.batching import PaddedBatch


@dataclass(frozen=True)
class SharedPrefixes:
    """Where the U states of a flat input stand in the sequences that attention sees.

    `states_RS` has a row for each sequence that is no prefix of another, padded on the right with state 0. `places_U`
    is the first place of each state in it, counted row after row.
    """

    states_RS: torch.Tensor
    places_U: torch.Tensor


@dataclass(frozen=True)
class StateBatch:
    """Inputs of a forward pass, and which states answer which token.

    A question is a state and the token that is to follow it: `states_Q` count positions of the inputs row after row,
    `targets_Q` are ids, and `questions_T` is the question of each response token, in order. Where `prefixes` is set
    the inputs are one row of states, in any order that has each behind its prefix.
    """

    input_ids_BS: torch.Tensor
    position_ids_BS: torch.Tensor | None
    prefixes: SharedPrefixes | None
    states_Q: torch.Tensor
    targets_Q: torch.Tensor
    questions_T: torch.Tensor

    @classmethod
    def padded(cls, batch: PaddedBatch) -> Self:
        """Every sequence in a row of its own, every token a question of its own."""
        states_T = batch.rows_T * batch.input_ids_BS.shape[1] + batch.positions_T
        return cls(batch.input_ids_BS, None, None, states_T, batch.targets_T, torch.arange(len(states_T)))

    def model_inputs(self, device: torch.device) -> dict[str, Any]:
        """Arguments of the model's forward.

        Without a mask of ones transformers would look for sequences in the positions, where these are none.
        """
        input_ids_BS = self.input_ids_BS.to(device)
        if self.prefixes is None or self.position_ids_BS is None:
            return {"input_ids": input_ids_BS}
        states_RS, places_U = self.prefixes.states_RS.to(device), self.prefixes.places_U.to(device)
        return {
            "input_ids": input_ids_BS,
            "position_ids": self.position_ids_BS.to(device),
            "attention_mask": torch.ones_like(input_ids_BS),
            "prefixes": SharedPrefixes(states_RS, places_U),
        }


def share_prefixes(batch: Sequence[TokenSequence]) -> StateBatch:
    """Every distinct prefix of the batch once. Every sequence needs a prompt token, and ids that the model has."""
    inputs = [np.array((sequence.prompt_token_ids + sequence.token_ids)[:-1], dtype=np.int64) for sequence in batch]
    states: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(batch)
    ids, positions = [], []
    rows: list[int] = []
    num_states, last = 0, -1
    for index in sorted(range(len(batch)), key=lambda index: inputs[index].tolist()):
        shared = 0 if last < 0 else _num_shared(inputs[last], inputs[index])
        own = len(inputs[index]) - shared
        states[index] = np.concatenate([states[last][:shared], np.arange(num_states, num_states + own)])
        ids.append(inputs[index][shared:])
        positions.append(np.arange(shared, shared + own))
        if last >= 0 and shared == len(inputs[last]):
            rows.pop()
        rows.append(index)
        num_states, last = num_states + own, index
    asked_T = np.concatenate([states[row][len(sequence.prompt_token_ids) - 1 :] for row, sequence in enumerate(batch)])
    targets_T = np.concatenate([np.array(sequence.token_ids, dtype=np.int64) for sequence in batch])
    asked_QP, questions_T = np.unique(np.stack([asked_T, targets_T], axis=1), axis=0, return_inverse=True)
    return StateBatch(
        torch.from_numpy(np.concatenate(ids))[None],
        torch.from_numpy(np.concatenate(positions))[None],
        _shared([states[row] for row in rows], num_states),
        torch.from_numpy(asked_QP[:, 0].copy()),
        torch.from_numpy(asked_QP[:, 1].copy()),
        torch.from_numpy(questions_T.reshape(-1)),
    )


def _num_shared(ids: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix."""
    length = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _shared(rows: list[np.ndarray], num_states: int) -> SharedPrefixes:
    width = max(len(row) for row in rows)
    states_RS = np.zeros((len(rows), width), dtype=np.int64)
    places_U = np.empty(num_states, dtype=np.int64)
    for number, row in reversed(list(enumerate(rows))):
        states_RS[number, : len(row)] = row
        places_U[row] = number * width + np.arange(len(row))
    return SharedPrefixes(torch.from_numpy(states_RS), torch.from_numpy(places_U))
