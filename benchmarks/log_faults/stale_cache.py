"""Log-probs behind a prefix cache that was kept across a change of weights, by transformers' own cache."""

from pathlib import Path

import torch

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import FloatArray, TokenSequence
from mismatch_probe.training_path.precision import load_training_model


def behind_cache(
    older: Path, newer: Path, responses: list[TokenSequence], block: int, dtype: Dtype
) -> list[FloatArray]:
    """Whole blocks of the prompt by the old weights, the rest by the new."""
    (before, arithmetic), (after, _) = (
        load_training_model(folder, dtype, TrainingPathSettings(), torch.device("cpu"), trust_remote_code=False)
        for folder in (older, newer)
    )
    columns = []
    with arithmetic.active():
        for sequence in responses:
            ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
            cached = (len(sequence.prompt_token_ids) - 1) // block * block
            past = before(ids[:, :cached], use_cache=True).past_key_values if cached else None
            logits = after(ids[:, cached:], past_key_values=past, use_cache=True).logits[0].float()
            start = len(sequence.prompt_token_ids) - 1 - cached
            log_probs = torch.log_softmax(logits[start:-1], -1)
            own = log_probs.gather(-1, torch.tensor(sequence.token_ids)[:, None])
            columns.append(own.squeeze(-1).double().numpy())
    return columns
