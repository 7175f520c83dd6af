"""A prefix cache that was kept across a change of weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.fault_lab.in_training import other_weights
from mismatch_probe.explain import explain
from mismatch_probe.records.sequences import FloatArray, TokenSequence
from tests.explain.logs import logged, scored, settings


@torch.no_grad()
def behind_cache(older: Path, newer: Path, responses: list[TokenSequence], block: int) -> list[FloatArray]:
    """Log-probs in BF16 by transformers alone: whole blocks of the prompt by the old weights, the rest by the new."""
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in (older, newer))
    columns = []
    for sequence in responses:
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        cached = (len(sequence.prompt_token_ids) - 1) // block * block
        past = before(ids[:, :cached], use_cache=True).past_key_values if cached else None
        logits = after(ids[:, cached:], past_key_values=past, use_cache=True).logits[0].float()
        start = len(sequence.prompt_token_ids) - 1 - cached
        log_probs = torch.log_softmax(logits[start:-1], -1).gather(-1, torch.tensor(sequence.token_ids)[:, None])
        columns.append(log_probs.squeeze(-1).double().numpy())
    return columns


@pytest.mark.parametrize("block", [1, 16])
def test_a_cache_of_older_weights_is_told_from_older_weights(
    llama: Path, responses: list[TokenSequence], tmp_path: Path, block: int
) -> None:
    older = other_weights(llama, tmp_path / "older", 0.05)
    log = logged(responses, mu=behind_cache(older, llama, responses, block), pi=scored(llama, responses))
    explanation = explain(settings(llama, weights=({"version": "step 7", "checkpoint": str(older)},)), log)
    mu, pi = explanation.sides
    assert pi.verdict.code == "as_declared"
    assert mu.verdict.code == "stale_weights"
    assert "the prompt's key-value cache left by the weights of step 7" in mu.verdict.sentence
