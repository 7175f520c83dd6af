# mypy: allow-untyped-calls
# ruff: noqa: N806 - shape suffixes
"""Passes with gradients, in the arithmetic that training has: log-probs of responses from one plain forward."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path.arithmetic import true_fp32
from mismatch_probe.training_path.batching import pad_batch
from mismatch_probe.training_path.memory import memory_errors_named
from mismatch_probe.training_path.products import CpuProducts


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """FP32 in IEEE FP32, and on a CPU FP16 products added up in FP32 as tensor cores do."""
    with ExitStack() as stack:
        stack.enter_context(true_fp32())
        if device.type == "cpu":
            stack.enter_context(CpuProducts())
        yield


def response_logprobs(
    model: PreTrainedModel, sequences: list[TokenSequence], *, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Log-probs [T] in nats of the response tokens, in order, computed in FP32 from the model's logits as `train` does.

    Padding, with id 0 to the right, is computed like any token: what overflows there reaches the weights' gradients.

    Raises:
        OutOfMemory: the batch does not fit.
    """
    padded = pad_batch(sequences, vocab_size=vocab_size)
    device = model.device
    num_rows, width = padded.input_ids_BS.shape
    advice = "lower --batch-tokens, or --max-new-tokens where one response does not fit"
    with memory_errors_named(f"computing {num_rows} sequences of up to {width} tokens", advice):
        logits_BSV = model(input_ids=padded.input_ids_BS.to(device), use_cache=False).logits
        logits_TV = logits_BSV[padded.rows_T.to(device), padded.positions_T.to(device)].float() / temperature
        return torch.log_softmax(logits_TV, dim=-1).gather(-1, padded.targets_T.to(device)[:, None]).squeeze(-1)
