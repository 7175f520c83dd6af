"""What forward passes compute: decoding token by token, prefill, and passes over whole sequences."""

from typing import Final

from mismatch_probe.compare.cost.architecture import Architecture, Lengths
from mismatch_probe.compare.cost.rates import Work
from mismatch_probe.dtypes import Dtype

_STEP_OPERATIONS: Final = 1250
_STEP_LAYER_OPERATIONS: Final = 60
PASS_OPERATIONS: Final = 2000
_PASS_LAYER_OPERATIONS: Final = 150
_SAMPLED_TOKEN_OPERATIONS: Final = 40
_SCORED_TOKEN_OPERATIONS: Final = 5
NUMBER_OPERATIONS: Final = 0.15
"""What the host hands out or does in Python, counted in small operations: in an engine's step and in each of its
layers, in a pass over whole sequences and in each of its layers, for a token that an engine samples or scores, and for
a number of a whole distribution that it hands over. Counts that fit what `benchmarks/cost_model.py` measured; what one
takes is measured on each machine.
"""
_LOGIT_BYTES: Final = 16
"""Moved for one logit: computed, its log-softmax, its share of the entropy."""


def decoding(dtype: Dtype, architecture: Architecture, prompts: Lengths, each: float, steps: float) -> Work:
    """Prefill of the prompts, then in `steps` steps `each` tokens behind every one of them: in a step every weight is
    read once, and every sequence's keys and values.
    """
    itemsize, prompt_tokens, tokens = dtype.num_bytes, float(prompts.sum()), len(prompts) * each
    return Work(
        matrix_flops=architecture.matrix_flops(prompt_tokens + tokens, len(prompts) + tokens),
        attention_flops=architecture.attention_flops(prompts, causal=True),
        memory_bytes=steps * architecture.parameters * itemsize
        + architecture.kv_bytes((prompt_tokens + tokens / 2) * each, itemsize)
        + tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=steps * (_STEP_OPERATIONS + architecture.num_layers * _STEP_LAYER_OPERATIONS)
        + tokens * _SAMPLED_TOKEN_OPERATIONS,
    )


def scored_by_engine(architecture: Architecture, lengths: Lengths, steps: float) -> Work:
    """Prefill of whole sequences in so many steps of the engine."""
    scored = Work(operations=float(lengths.sum()) * _SCORED_TOKEN_OPERATIONS)
    return whole_passes(architecture, lengths, steps) + scored


def whole_passes(architecture: Architecture, lengths: Lengths, passes: float) -> Work:
    """Forward passes over whole sequences that give log-probs of every token."""
    tokens = float(lengths.sum())
    return Work(
        matrix_flops=architecture.matrix_flops(tokens, tokens),
        attention_flops=architecture.attention_flops(lengths, causal=True),
        memory_bytes=tokens * architecture.vocab_size * _LOGIT_BYTES,
        operations=passes * (PASS_OPERATIONS + architecture.num_layers * _PASS_LAYER_OPERATIONS),
    )
