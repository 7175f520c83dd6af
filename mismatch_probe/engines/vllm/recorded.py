"""What was recorded inside vLLM, read with transformers' names and in the order of the tokens that were asked for."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import ATTENTION, ActivationBatch, key

_RENAMED: Final = {"block_sparse_moe": "mlp"}
_OWN_NAMES: Final = {"self_attn.attn": ATTENTION}


def infer_names(layout: Mapping[str, Any]) -> dict[str, str]:
    """For each place inside a layer, under transformers' name, what a person finds in vLLM."""
    names = {}
    for path in layout["module_paths"]:
        for name, part in _places(path, layout):
            names[name] = path if part is None else f"{path}[{part}]"
    return names


def canonical_tensors(raw: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """A layer's tensors under transformers' names: fused modules cut into the parts that the checkpoint has."""
    tensors: dict[str, Tensor] = {}
    for stored, tensor in raw.items():
        path, _, end = stored.rpartition(".")
        places = _places(path, layout)
        is_cut = len(places) > 1 and end == "out"
        parts = torch.split(tensor, layout["part_sizes"][path], dim=1) if is_cut else [tensor] * len(places)
        for (name, _), part in zip(places, parts, strict=True):
            tensors[key(name, end)] = part.clone(memory_format=torch.contiguous_format)
    return tensors


def _places(path: str, layout: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The places that a module of vLLM covers, each with its part's name where it is one of several."""
    if path in _OWN_NAMES:
        return [(_OWN_NAMES[path], None)]
    above, dot, last = path.rpartition(".")
    prefix = ".".join(_RENAMED.get(word, word) for word in above.split(".")) + dot
    parts = layout["fused"].get(last, [])
    if len(parts) > 1 and path in layout["part_sizes"]:
        return [(f"{prefix}{part}", part) for part in parts]
    return [(prefix + _RENAMED.get(last, last), None)]


def rows_of_steps(steps: Sequence[tuple[Tensor, Tensor]], batch: ActivationBatch) -> list[Tensor]:
    """For each token of each step (ids and positions [T]), its row in the batch; -1 for what is not asked for.

    Raises:
        EngineError: a token is of no sequence of the batch, or a row was never computed.
    """
    ids = [[*sequence.prompt_token_ids, *sequence.token_ids] for sequence in batch.sequences]
    starts = [0]
    for rows in batch.rows_per_sequence:
        starts.append(starts[-1] + rows)
    done = [0] * len(ids)
    targets = []
    for input_ids, positions in steps:
        step_ids, step_positions = input_ids.tolist(), positions.tolist()
        target, at = torch.full_like(input_ids, -1), 0
        while at < len(step_ids):
            number, length = _next_run(ids, done, step_ids[at:], step_positions[at:])
            last = len(ids[number]) - 1
            for offset in range(length):
                if done[number] + offset < last:
                    target[at + offset] = starts[number] + done[number] + offset
            done[number] += length
            at += length
        targets.append(target)
    if any(count < len(sequence_ids) for count, sequence_ids in zip(done, ids, strict=True)):
        raise EngineError("vLLM did not compute every token of a batch; leave prefix caching off")
    return targets


def _next_run(ids: list[list[int]], done: list[int], step_ids: list[int], step_positions: list[int]) -> tuple[int, int]:
    """The sequence that goes on with these ids at these positions, and how many of them it takes."""
    best, first = (-1, 0), step_positions[0]
    for number, sequence_ids in enumerate(ids):
        if done[number] != first:
            continue
        length = 0
        for asked in zip(sequence_ids[first:], range(first, len(sequence_ids)), strict=True):
            if length == len(step_ids) or asked != (step_ids[length], step_positions[length]):
                break
            length += 1
        if length > best[1]:
            best = (number, length)
    if best[1] == 0:
        raise EngineError("vLLM computed a token that was not asked for, so its activations cannot be read")
    return best
