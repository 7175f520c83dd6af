"""A LoRA adapter that real vLLM serves, against the same adapter in the training path."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.config.model import SamplingSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine
from mismatch_probe.engines.vllm.worker import adapter_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.stored_tensors import read_adapter
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path.scorer import Scorer
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.adapters import make_adapter
from tests.engines.conftest import StartEngine, gaps, requests
from tests.tiny_models import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PLAIN = SamplingSettings(max_new_tokens=32)


@pytest.fixture(scope="module")
def engine(start: StartEngine, llama: Path, adapter: Path) -> Engine:
    return start(llama, adapter=adapter, max_new_tokens=32)


@pytest.fixture(scope="module")
def served(engine: Engine) -> tuple[list[TokenSequence], list[ScoredSequence]]:
    sampled = engine.sample(requests(), PLAIN)
    return [response.sequence for response in sampled], [response.scores for response in sampled]


def pi(llama: Path, adapter: Path | None, *, merged: bool = False) -> Scorer:
    settings = TrainingPathSettings(
        device="cpu", adapter=None if adapter is None else str(adapter), adapter_merged=merged
    )
    return Scorer.load(llama, Dtype.FP32, settings)


def found(scorer: Scorer, engine: Engine) -> list[tuple[str, str]]:
    """Levels and settings of what the two sides' settings make the pair."""
    findings = preflight(Sides(Dtype.FP32, Dtype.FP32, scorer.effective_settings(), engine.effective_settings()))
    return [(finding.level, finding.setting) for finding in findings if finding.setting == "adapter"]


def test_what_is_served_is_what_the_trainer_has_beside_its_weights(
    engine: Engine, served: tuple[list[TokenSequence], list[ScoredSequence]], llama: Path, adapter: Path
) -> None:
    sequences, decoded = served
    assert np.abs(gaps(decoded, engine.replay(sequences))).max() < 1e-5
    with pi(llama, adapter) as scorer:
        assert np.abs(gaps(decoded, scorer.score_batch(sequences))).max() < 5e-5
        mine, theirs = scorer.effective_settings()["adapter"], engine.effective_settings()["adapter"]
        assert theirs == {**mine, "change_norm": pytest.approx(mine["change_norm"], rel=1e-6)}
        assert found(scorer, engine) == []


def test_merged_into_the_weights_it_agrees_in_fp32_and_that_is_noted(
    engine: Engine, served: tuple[list[TokenSequence], list[ScoredSequence]], llama: Path, adapter: Path
) -> None:
    sequences, decoded = served
    with pi(llama, adapter, merged=True) as scorer:
        assert np.abs(gaps(decoded, scorer.score_batch(sequences))).max() < 1e-4
        assert found(scorer, engine) == [("note", "adapter")]


def test_an_adapter_on_one_side_alone_is_seen(
    engine: Engine, served: tuple[list[TokenSequence], list[ScoredSequence]], llama: Path
) -> None:
    sequences, decoded = served
    with pi(llama, None) as scorer:
        assert np.abs(gaps(decoded, scorer.score_batch(sequences))).mean() > 0.1
        assert found(scorer, engine) == [("error", "adapter")]


def test_another_alpha_is_seen(
    engine: Engine,
    served: tuple[list[TokenSequence], list[ScoredSequence]],
    llama: Path,
    tmp_path: Path,
) -> None:
    sequences, decoded = served
    with pi(llama, make_adapter(tmp_path / "louder", llama, alpha=32)) as scorer:
        assert np.abs(gaps(decoded, scorer.score_batch(sequences))).mean() > 0.1
        assert found(scorer, engine) == [("error", "adapter")]


def test_a_gpu_serves_none_in_fp32_and_vllm_none_of_any_rank(adapter: Path) -> None:
    read = read_adapter(adapter)
    assert adapter_arguments(read, Dtype.BF16, on_cpu=False)["max_lora_rank"] == 8
    with pytest.raises(UsageError, match="on a GPU in 16 bit alone"):
        adapter_arguments(read, Dtype.FP32, on_cpu=False)
    with pytest.raises(UsageError, match="has rank 600, and vLLM serves up to 512"):
        adapter_arguments(replace(read, rank=600), Dtype.BF16, on_cpu=True)


def test_an_adapter_of_another_model_is_refused_in_one_sentence(
    start: StartEngine, llama: Path, tmp_path: Path
) -> None:
    wider = make_checkpoint(tmp_path / "wider", "llama", hidden_size=96)
    with pytest.raises(
        UsageError, match=r"vLLM does not serve the adapter .* \(.*\); give engine\.adapter one of this"
    ):
        start(llama, adapter=make_adapter(tmp_path / "other", wider))
    with pytest.raises(UsageError, match=r"--vllm\.enable_lora cannot be given: it is set by engine\.adapter"):
        start(llama, args={"enable_lora": True})
