"""How far the reference in FP64 is from one that computes RoPE's inverse frequencies in FP64 too.

    python -m benchmarks.rope_frequencies CHECKPOINT [TOKENS ...]

transformers computes these frequencies in FP32 and keeps them so; all else of the reference is FP64 (a test of
`tests/training_path/test_reference.py` shows it). The tokens are those of a document of this repository.
"""

import sys
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.training_path.arithmetic import Arithmetic, Float64Throughout
from mismatch_probe.training_path.precision import load_reference_model

_TEXT: Final = Path(__file__).parents[1] / "docs" / "reading-the-report.md"
_LENGTHS: Final = (16, 128, 512)
_HEAD_TOKENS: Final = 64
"""Logits of so many tokens at a time."""


def reference(folder: Path, dtype: Dtype) -> tuple[PreTrainedModel, Arithmetic]:
    model, arithmetic, _ = load_reference_model(
        folder, dtype, TrainingPathSettings(), torch.device("cpu"), rounded_to=None, trust_remote_code=False
    )
    return model, arithmetic


def log_probs(model: PreTrainedModel, arithmetic: Arithmetic, ids: torch.Tensor) -> torch.Tensor:
    """The log-probs [S - 1] of all tokens [S] but the first, at shapes [S, D] and [T, V] between."""
    body, head = model.base_model, model.get_output_embeddings()
    assert head is not None
    parts = []
    with arithmetic.active():
        hidden = body(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        for states, targets in zip(hidden.split(_HEAD_TOKENS), ids[1:].split(_HEAD_TOKENS), strict=True):
            logits = head(states).double()
            parts.append(logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1))
    return torch.cat(parts)


def compute_frequencies_in_fp64(model: PreTrainedModel) -> float:
    """Replace the frequencies of every rotary module; returns the largest relative change."""
    largest = 0.0
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for name, buffer in list(module.named_buffers(recurse=False)) if kinds is not None else []:
            if not name.endswith("inv_freq"):
                continue
            layer_type = name.removesuffix("inv_freq").removesuffix("original_").rstrip("_")
            kind = kinds[layer_type] if layer_type else kinds
            function: Any = ROPE_INIT_FUNCTIONS.get(kind) or module.compute_default_rope_parameters
            with Float64Throughout():
                exact, _ = function(module.config, **({"layer_type": layer_type} if layer_type else {}))
            largest = max(largest, float(((exact - buffer.double()) / exact).abs().max()))
            setattr(module, name, exact)
    return largest


def main(folder: Path, lengths: list[int]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(_TEXT.read_text(encoding="utf-8"))["input_ids"])
    model, arithmetic = reference(folder, Dtype.FP32)
    in_fp32 = [log_probs(model, arithmetic, ids[:length]) for length in lengths]
    del model
    model, arithmetic = reference(folder, Dtype.FP64)
    in_fp64 = [log_probs(model, arithmetic, ids[:length]) for length in lengths]
    print(f"largest relative change of a frequency: {compute_frequencies_in_fp64(model):.3g}")
    for length, first, second in zip(lengths, in_fp32, in_fp64, strict=True):
        change = (second - log_probs(model, arithmetic, ids[:length])).abs()
        error = (first - second).abs()
        print(
            f"{length} tokens: mean {change.mean():.3g} nats, largest {change.max():.3g}; FP32 is {error.mean():.3g} "
            f"from FP64, largest {error.max():.3g}; ratio of the means {change.mean() / error.mean():.3g}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]] or list(_LENGTHS))
