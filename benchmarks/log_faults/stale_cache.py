"""Log-probs behind a prefix cache that was kept across a change of weights, by transformers alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mismatch_probe.records.sequences import FloatArray, TokenSequence


@torch.no_grad()
def behind_cache(
    older: Path, newer: Path, responses: list[TokenSequence], block: int, dtype: torch.dtype
) -> list[FloatArray]:
    """Whole blocks of the prompt by the old weights, the rest by the new."""
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for folder in (older, newer))
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
