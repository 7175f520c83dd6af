"""vLLM cuts a batch as it likes; ids and positions tell which row is whose."""

import pytest
import torch

from mismatch_probe.engines.vllm.outputs import canonical_tensors, infer_names, rows_of_steps
from mismatch_probe.errors import EngineError
from mismatch_probe.records.activations import ATTENTION, ActivationBatch
from mismatch_probe.records.sequences import TokenSequence

BATCH = ActivationBatch(0, 0, [TokenSequence("a", [1, 2, 3], [4, 5]), TokenSequence("b", [1, 2], [9])], [])
"""Rows 0 to 3 are the first four tokens of a, rows 4 and 5 the first two of b."""


def step(*tokens: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of a step."""
    ids, positions = zip(*tokens, strict=True)
    return torch.tensor(ids), torch.tensor(positions)


A = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
B = [(1, 0), (2, 1), (9, 2)]


def test_whole_sequences_in_one_step() -> None:
    (rows,) = rows_of_steps([step(*A, *B)], BATCH)
    assert rows.tolist() == [0, 1, 2, 3, -1, 4, 5, -1]


def test_sequences_in_another_order() -> None:
    (rows,) = rows_of_steps([step(*B, *A)], BATCH)
    assert rows.tolist() == [4, 5, -1, 0, 1, 2, 3, -1]


def test_a_prompt_cut_in_chunks_goes_on_where_it_stopped() -> None:
    first, second = rows_of_steps([step(*A[:3]), step(*A[3:], *B)], BATCH)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, -1, 4, 5, -1]


def test_a_chunk_does_not_run_on_into_a_sequence_that_starts_like_its_rest() -> None:
    batch = ActivationBatch(0, 0, [TokenSequence("a", [1, 2], [1, 7]), TokenSequence("b", [1, 7], [8])], [])
    first, second = rows_of_steps([step((1, 0), (2, 1), (1, 0), (7, 1), (8, 2)), step((1, 2), (7, 3))], batch)
    assert first.tolist() == [0, 1, 3, 4, -1]
    assert second.tolist() == [2, -1]


def test_a_token_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(EngineError, match="not asked for"):
        rows_of_steps([step(*A, (1, 0), (2, 1), (8, 2))], BATCH)


def test_a_batch_with_tokens_missing_is_refused() -> None:
    with pytest.raises(EngineError, match="prefix caching"):
        rows_of_steps([step(*A, *B[:2])], BATCH)


LAYOUT = {
    "module_paths": ["self_attn.qkv_proj", "self_attn.attn", "block_sparse_moe.gate", "mlp.gate_up_proj", "norm"],
    "fused": {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "norm": ["norm"]},
    "part_sizes": {"self_attn.qkv_proj": [4, 2, 2], "mlp.gate_up_proj": [3, 3]},
}


def test_fused_outputs_are_cut_into_the_checkpoints_parts() -> None:
    fused = torch.arange(16.0).view(2, 8)
    tensors = canonical_tensors({"self_attn.qkv_proj.out": fused, "self_attn.qkv_proj.in0": torch.ones(2, 5)}, LAYOUT)
    assert torch.equal(tensors["self_attn.q_proj.out"], fused[:, :4])
    assert torch.equal(tensors["self_attn.k_proj.out"], fused[:, 4:6])
    assert torch.equal(tensors["self_attn.v_proj.out"], fused[:, 6:])
    assert all(torch.equal(tensors[f"self_attn.{name}_proj.in0"], torch.ones(2, 5)) for name in "qkv")


def test_names_say_where_a_place_is_found_in_the_engine() -> None:
    names = infer_names(LAYOUT)
    assert names["self_attn.k_proj"] == "self_attn.qkv_proj[k_proj]"
    assert names["mlp.up_proj"] == "mlp.gate_up_proj[up_proj]"
    assert names[ATTENTION] == "self_attn.attn"
    assert names["mlp.gate"] == "block_sparse_moe.gate"
    assert names["norm"] == "norm"
