"""An architecture whose plan divides a part of its layers alone is held as the plan says."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.training_path import Scorer
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.training_path.flat import mean_error
from tests.training_path.ranks.jobs import score_over_ranks

pytestmark = pytest.mark.slow


def deepseek(**changes: Any) -> DeepseekV3Config:
    """Attention over latent vectors, one dense layer and one of experts."""
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=32, max_position_embeddings=2048, **changes,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, "deepseek-v3", deepseek)
    return make_checkpoint(tmp_path, "deepseek-v3", init_std=0.05)


def test_a_plan_that_leaves_attention_whole_is_no_version_that_loads_all(
    folder: Path, sequences: list[TokenSequence]
) -> None:
    settings = TrainingPathSettings(tensor_parallel=2)
    scored, effective = score_over_ranks(2, folder, Dtype.FP32, settings, [sequences])
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings()) as scorer:
        assert mean_error(scored, scorer.score_batch(sequences)) < 1e-5
    assert 0.5 < effective["ranks"]["held_share"] < 0.95
    with pytest.raises(EngineError, match=r"each rank holds whole weights all the same, such as model\.\w+"):
        score_over_ranks(2, folder, Dtype.FP32, settings, [sequences], fault="loads whole")
