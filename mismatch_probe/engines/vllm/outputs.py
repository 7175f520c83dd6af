"""What comes out of vLLM: request outputs, recorded activations and routing, in the order of the requested tokens."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from mismatch_probe.engines.token_text import TokenTexts
from mismatch_probe.engines.vllm.hooks import CHOICES_FILE, TOKENS_FILE
from mismatch_probe.errors import EngineError, RoutingUnseen
from mismatch_probe.records.activations import ATTENTION, ActivationBatch, key
from mismatch_probe.records.legs import SequenceRouting, by_sequence
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence
from mismatch_probe.stats.sequences import is_missing

_FINISHED: Final = ("stop", "length")


def sampled_sequence(request: SampleRequest, output: Any, texts: TokenTexts) -> SampledSequence:
    """The response of one decoded request.

    Raises:
        EngineError: the request was aborted, or ran on another prompt than the one given.
    """
    completion = output.outputs[0]
    _require_same_ids(request.id, request.prompt.token_ids, output.prompt_token_ids)
    if completion.finish_reason not in _FINISHED:
        raise EngineError(
            f"vLLM ended the response {request.id} with {completion.finish_reason!r} instead of finishing it"
        )
    token_ids = list(completion.token_ids)
    return SampledSequence(
        sequence=TokenSequence(request.id, list(request.prompt.token_ids), token_ids),
        scores=scores(request.id, token_ids, completion.logprobs, first=0),
        finish_reason=completion.finish_reason,
        token_texts=texts(token_ids),
    )


def replayed_scores(sequence: TokenSequence, output: Any) -> ScoredSequence:
    """The prefill log-probs of one replayed request's response part.

    Raises:
        EngineError: vLLM scored other ids than those given.
    """
    _require_same_ids(sequence.id, [*sequence.prompt_token_ids, *sequence.token_ids], output.prompt_token_ids)
    first = len(sequence.prompt_token_ids)
    return scores(sequence.id, sequence.token_ids, output.prompt_logprobs, first=first)


def scores(sequence_id: str, token_ids: list[int], flat: Any, *, first: int) -> ScoredSequence:
    """Log-probs and arg-max ids of `token_ids` out of a `FlatLogprobs` whose position `first` is the first token's.

    Each position holds the token asked for, then the most probable one where that is another. A position that is absent
    gives NaN and id -1, a log-prob that vLLM calls missing NaN.

    Raises:
        EngineError: a position holds another token than the one asked for.
    """
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    top1_ids = np.full(len(token_ids), -1, dtype=np.int32)
    num_positions = 0 if flat is None else len(flat.start_indices)
    for index, token_id in enumerate(token_ids[: max(0, num_positions - first)]):
        start, end = flat.start_indices[first + index], flat.end_indices[first + index]
        if start == end:
            continue
        if flat.token_ids[start] != token_id:
            raise EngineError(
                f"vLLM returned the log-prob of token {flat.token_ids[start]} where {sequence_id} has {token_id} "
                f"(response position {index})"
            )
        logprobs[index], top1_ids[index] = flat.logprobs[start], flat.token_ids[min(start + 1, end - 1)]
    logprobs[is_missing(logprobs)] = np.nan
    return ScoredSequence(sequence_id, logprobs, top1_ids)


def whole_distributions(outputs: Sequence[Any], vocab_size: int) -> FloatArray:
    """Log-probs of the first decoded position of each request by token id [P, V]; NaN for ids that are absent."""
    rows = np.full((len(outputs), vocab_size), np.nan, dtype=np.float32)
    for row, output in zip(rows, outputs, strict=True):
        flat = output.outputs[0].logprobs
        if flat is not None and flat.start_indices:
            first = slice(flat.start_indices[0], flat.end_indices[0])
            row[flat.token_ids[first]] = flat.logprobs[first]
    return rows


def num_missing(sequences: Sequence[ScoredSequence]) -> int:
    """Tokens without a log-prob."""
    return sum(int(np.isnan(sequence.logprobs).sum()) for sequence in sequences)


def _require_same_ids(sequence_id: str, ids: Sequence[int], vllm_ids: Sequence[int] | None) -> None:
    if vllm_ids is None or list(ids) != list(vllm_ids):
        raise EngineError(f"vLLM ran {sequence_id} on other token ids than those given")


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
    for name_of_step, tensor in raw.items():
        path, _, end = name_of_step.rpartition(".")
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
    parent, dot, last = path.rpartition(".")
    prefix = ".".join(_RENAMED.get(word, word) for word in parent.split(".")) + dot
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
    num_done = [0] * len(ids)
    targets = []
    for input_ids, positions in steps:
        step_ids, step_positions = input_ids.tolist(), positions.tolist()
        target, at = torch.full_like(input_ids, -1), 0
        while at < len(step_ids):
            number, length = _next_run(ids, num_done, step_ids[at:], step_positions[at:])
            last = len(ids[number]) - 1
            for offset in range(length):
                if num_done[number] + offset < last:
                    target[at + offset] = starts[number] + num_done[number] + offset
            num_done[number] += length
            at += length
        targets.append(target)
    if any(count < len(sequence_ids) for count, sequence_ids in zip(num_done, ids, strict=True)):
        raise EngineError("vLLM did not compute every token of a batch; leave prefix caching off")
    return targets


def _next_run(
    ids: list[list[int]], num_done: list[int], step_ids: list[int], step_positions: list[int]
) -> tuple[int, int]:
    """The sequence that goes on with these ids at these positions, and how many of them it takes."""
    best, first = (-1, 0), step_positions[0]
    for number, sequence_ids in enumerate(ids):
        if num_done[number] != first:
            continue
        length = 0
        for position in zip(sequence_ids[first:], range(first, len(sequence_ids)), strict=True):
            if length == len(step_ids) or position != (step_ids[length], step_positions[length]):
                break
            length += 1
        if length > best[1]:
            best = (number, length)
    if best[1] == 0:
        raise EngineError("vLLM computed a token that was not asked for, so its activations cannot be read")
    return best


@contextmanager
def record_routing(llm: Any, sequences: Sequence[TokenSequence]) -> Iterator[list[SequenceRouting]]:
    """What every router chooses for the sequences while they are replayed inside; filled at the end, in their order.

    Raises:
        RoutingUnseen: the model has no router that could be read.
        EngineError: vLLM did not compute every token, or others too.
    """
    routing: list[SequenceRouting] = []
    with tempfile.TemporaryDirectory(prefix="mismatch-probe-routing-") as folder:
        llm.collective_rpc("probe_record_routing", args=(folder,))
        try:
            yield routing
        finally:
            llm.collective_rpc("probe_record_routing_stop")
        layers, experts_LTK, weights_LTK = _gather_choices(Path(folder), ActivationBatch(0, 0, list(sequences), []))
    routing += by_sequence(sequences, layers, experts_LTK.numpy(), weights_LTK.numpy())


def _gather_choices(folder: Path, batch: ActivationBatch) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The layers that have experts, and every step's choices in the order of the tokens asked for."""
    steps = sorted(folder.iterdir())
    tokens = [load_file(step / TOKENS_FILE) for step in steps]
    targets = rows_of_steps([(step["input_ids"], step["positions"]) for step in tokens], batch)
    choices = [load_file(step / CHOICES_FILE) for step in steps]
    layers = tuple(sorted(int(name.removeprefix("experts.")) for name in choices[0] if name.startswith("experts.")))
    if not layers:
        raise RoutingUnseen(
            "no router of this engine hands its choice to the experts, as in a dense model or where one kernel does "
            "both, so what it chooses cannot be read"
        )
    num_tokens, num_chosen = sum(batch.rows_per_sequence), choices[0][f"experts.{layers[0]}"].shape[1]
    experts_LTK = torch.full((len(layers), num_tokens, num_chosen), -1, dtype=torch.int32)
    weights_LTK = torch.zeros(len(layers), num_tokens, num_chosen)
    for step, target_T in zip(choices, targets, strict=True):
        kept_T = target_T >= 0
        for index, layer in enumerate(layers):
            experts_LTK[index, target_T[kept_T]] = step[f"experts.{layer}"][: len(kept_T)][kept_T]
            weights_LTK[index, target_T[kept_T]] = step[f"weights.{layer}"][: len(kept_T)][kept_T]
    return layers, experts_LTK, weights_LTK
