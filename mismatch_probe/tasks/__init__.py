"""Prompts: built-in tasks, files and hub data sets, encoded once. Nothing heavy loads before a tokenizer is needed."""

from mismatch_probe.tasks.encoding import check_lengths, encode_prompts
from mismatch_probe.tasks.problems import Prompt, verify
from mismatch_probe.tasks.source import Asking, load_prompts, load_tokenizer, num_held, resolve_model, tokenizer_for

__all__ = [
    "Asking",
    "Prompt",
    "check_lengths",
    "encode_prompts",
    "load_prompts",
    "load_tokenizer",
    "num_held",
    "resolve_model",
    "tokenizer_for",
    "verify",
]
