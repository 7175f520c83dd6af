"""A part in FP32, the rest as it was: held against what the same part is elsewhere."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import FloatArray
from mismatch_probe.training_path.inside.fp32_parts import (
    EVERYTHING,
    LM_HEAD,
    NORMS,
    RESIDUAL,
    ROUTER,
    model_part_in_fp32,
    model_parts,
)
from mismatch_probe.training_path.precision import load_training_model
from mismatch_probe.training_path.scorer import Scorer
from tests.localize.bench import CPU, some_sequences

pytestmark = pytest.mark.slow

Checkpoint = Callable[[str], Path]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral-sliding", "qwen3-moe", "gemma2")


def flat(scorer: Scorer) -> FloatArray:
    return np.concatenate([one.logprobs for one in scorer.score_batch(some_sequences())])


class Loaded:
    """A training path in BF16 and the log-probs that it gives with parts in FP32."""

    def __init__(self, folder: Path) -> None:
        settings = TrainingPathSettings()
        self.model, arithmetic = load_training_model(folder, Dtype.BF16, settings, CPU, trust_remote_code=False)
        self.scorer = Scorer(folder, self.model, arithmetic, settings, temperature=1.0, weights_dtype=Dtype.BF16)

    def logprobs(self, *parts: str) -> FloatArray:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(model_part_in_fp32(self.model, part))
            return flat(self.scorer)


def reference(folder: Path) -> FloatArray:
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings(), reference=True) as scorer:
        return flat(scorer)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_changes_something_and_nothing_is_left_behind(checkpoint: Checkpoint, family: str) -> None:
    loaded = Loaded(checkpoint(family))
    for name, weight in loaded.model.named_parameters():
        if "norm" in name:
            weight.data += torch.linspace(-0.1, 0.1, len(weight)).bfloat16()
    plain = loaded.logprobs()
    kernels = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    weights = copy.copy(dict(loaded.model.named_parameters()))
    for part in [*model_parts(loaded.model), EVERYTHING]:
        with_part = loaded.logprobs(part)
        assert np.isfinite(with_part).all()
        is_fp32_already = (family, part) == ("gemma2", NORMS)
        assert np.array_equal(with_part, plain) == is_fp32_already, part
        assert np.array_equal(loaded.logprobs(), plain), part
    after = dict(loaded.model.named_parameters())
    assert weights.keys() == after.keys()
    assert all(after[name] is weight for name, weight in weights.items())
    assert kernels == ALL_ATTENTION_FUNCTIONS._local_mapping


def test_an_fp32_head_is_the_training_paths_own_fp32_head(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3")
    with Scorer.load(folder, Dtype.BF16, TrainingPathSettings(lm_head_dtype=Dtype.FP32)) as scorer:
        configured = flat(scorer)
    assert np.array_equal(Loaded(folder).logprobs(LM_HEAD), configured)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_in_fp32_is_the_reference(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    np.testing.assert_allclose(Loaded(folder).logprobs(EVERYTHING), reference(folder), atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_all_parts_together_come_nearer_to_the_reference(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    loaded, exact = Loaded(folder), reference(folder)
    parts = [part for part in model_parts(loaded.model) if not part.startswith("layer ")]
    errors = {
        parts_raised: np.square(loaded.logprobs(*parts_raised) - exact).mean() for parts_raised in [(), tuple(parts)]
    }
    assert errors[tuple(parts)] < 0.8 * errors[()]


def test_the_residual_stream_stays_fp32_and_what_reads_it_does_not(checkpoint: Checkpoint) -> None:
    loaded = Loaded(checkpoint("llama"))
    seen: dict[str, set[torch.dtype]] = {"stream": set(), "read": set()}
    layers = loaded.model.model.layers
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: seen["stream"].add(output.dtype))
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen["read"].add(args[0].dtype))
    loaded.logprobs(RESIDUAL)
    assert seen == {"stream": {torch.float32}, "read": {torch.bfloat16}}


def test_raised_weights_are_counted(checkpoint: Checkpoint) -> None:
    model = Loaded(checkpoint("qwen3")).model
    with model_part_in_fp32(model, LM_HEAD) as extra_bytes:
        assert extra_bytes == 4 * model.lm_head.weight.numel()
    with model_part_in_fp32(model, NORMS) as extra_bytes:
        assert extra_bytes == 4 * sum(one.numel() for name, one in model.named_parameters() if "norm" in name)


def test_only_a_mixture_of_experts_has_a_router(checkpoint: Checkpoint) -> None:
    assert ROUTER in model_parts(Loaded(checkpoint("qwen3-moe")).model)
    assert ROUTER not in model_parts(Loaded(checkpoint("qwen3")).model)


def test_a_part_that_does_not_exist_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="no part"), model_part_in_fp32(Loaded(checkpoint("qwen3")).model, "tokenizer"):
        pass
