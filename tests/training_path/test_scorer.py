from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import EngineError
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.training_path import Scorer, batching
from mismatch_probe.training_path.batching import ChunkedHead
from tests.tiny_models import FAMILIES, make_checkpoint
from tests.training_path.flat import flat

pytestmark = pytest.mark.slow

FP32_NOISE = 5e-5
Checkpoint = Callable[[str], Path]


def plain_scores(folder: Path, sequences: list[TokenSequence], temperature: float = 1.0) -> np.ndarray:
    """One forward of transformers a sequence and a log-softmax over all of it: what a person would write."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scores = []
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt_token_ids + sequence.token_ids])
        with torch.no_grad():
            log_softmax = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        scores.append(log_softmax.gather(1, ids[0, 1:, None])[-len(sequence.token_ids) :, 0])
    return torch.cat(scores).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_one_plain_forward_a_sequence(
    family: str, checkpoint: Checkpoint, score: Callable[..., list[ScoredSequence]], sequences: list[TokenSequence]
) -> None:
    scores = score(family, Dtype.FP32)
    assert [len(score.logprobs) for score in scores] == [len(sequence.token_ids) for sequence in sequences]
    assert [score.id for score in scores] == [sequence.id for sequence in sequences]
    assert flat(scores).dtype == np.float32
    np.testing.assert_allclose(flat(scores), plain_scores(checkpoint(family), sequences), atol=FP32_NOISE, rtol=0)


def test_temperature_divides_the_logits(
    checkpoint: Checkpoint, score: Callable[..., list[ScoredSequence]], sequences: list[TokenSequence]
) -> None:
    scores = score("llama", Dtype.FP32, temperature=0.7)
    expected = plain_scores(checkpoint("llama"), sequences, temperature=0.7)
    np.testing.assert_allclose(flat(scores), expected, atol=FP32_NOISE, rtol=0)
    assert np.abs(flat(score("llama", Dtype.FP32)) - expected).max() > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_whole_distribution_holds_the_log_probs_of_the_tokens_that_were_sampled(
    temperature: float, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    given, positions = sequences[3], [0, 7, 39]
    with Scorer.load(checkpoint("llama"), Dtype.FP32, TrainingPathSettings(), temperature=temperature) as scorer:
        rows = scorer.distributions(given, positions)
        (scores,) = scorer.score_batch([given])
    np.testing.assert_allclose(np.exp(rows.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    sampled = rows[np.arange(3), [given.token_ids[position] for position in positions]]
    np.testing.assert_allclose(sampled, scores.logprobs[positions], atol=FP32_NOISE, rtol=0)


def test_top1_and_entropy_belong_to_the_same_positions(checkpoint: Checkpoint, sequences: list[TokenSequence]) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.FP32, TrainingPathSettings()) as scorer:
        greedy = sequences[0]
        for _ in range(3):
            (scores,) = scorer.score_batch([greedy])
            assert scores.top1_ids is not None
            greedy = TokenSequence("greedy", greedy.prompt_token_ids, [int(scores.top1_ids[0]), *greedy.token_ids[1:]])
        (scores,) = scorer.score_batch([greedy])
    assert scores.top1_ids is not None
    assert scores.entropy_nats is not None
    assert scores.top1_ids[0] == greedy.token_ids[0]
    most_likely = scores.top1_ids == np.array(greedy.token_ids)
    assert (scores.entropy_nats[most_likely] >= -scores.logprobs[most_likely] - 1e-5).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-sliding", "gemma2"])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16, Dtype.FP16])
def test_padding_ids_cannot_change_a_logprob(
    family: str, dtype: Dtype, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    with Scorer.load(checkpoint(family), dtype, TrainingPathSettings()) as scorer:
        padded_with = {pad_id: scorer.score_batch(sequences, pad_id=pad_id) for pad_id in (0, 77, 258)}
    for pad_id in (77, 258):
        np.testing.assert_array_equal(flat(padded_with[0]), flat(padded_with[pad_id]))


def test_padding_ids_cannot_route_another_tokens_experts(
    checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    with Scorer.load(checkpoint("qwen3-moe"), Dtype.FP32, TrainingPathSettings()) as scorer:
        scores, other = (flat(scorer.score_batch(sequences, pad_id=pad_id)) for pad_id in (0, 77))
    np.testing.assert_allclose(scores, other, atol=FP32_NOISE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_scores_as_batches_of_one(
    family: str, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    with Scorer.load(checkpoint(family), Dtype.FP32, TrainingPathSettings()) as scorer:
        together = scorer.score_batch(sequences)
        alone = [scorer.score_batch([sequence])[0] for sequence in sequences]
    np.testing.assert_allclose(flat(together), flat(alone), atol=FP32_NOISE, rtol=0)


def test_what_is_not_finite_in_padding_cannot_reach_a_response(
    tmp_path: Path, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    poisoned_id = 300
    folder = _with_embedding(checkpoint("llama"), tmp_path, poisoned_id, float("nan"))
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings()) as scorer:
        poisoned = scorer.score_batch(sequences, pad_id=poisoned_id)
        clean = scorer.score_batch(sequences, pad_id=0)
    assert np.isfinite(flat(poisoned)).all()
    np.testing.assert_allclose(flat(poisoned), flat(clean), atol=FP32_NOISE, rtol=0)


def test_what_is_not_finite_in_the_model_is_returned_as_it_is(
    tmp_path: Path, checkpoint: Checkpoint, sequences: list[TokenSequence]
) -> None:
    poisoned_id = sequences[0].token_ids[5]
    folder = _with_embedding(checkpoint("llama"), tmp_path, poisoned_id, float("nan"))
    with Scorer.load(folder, Dtype.FP32, TrainingPathSettings()) as scorer:
        (scores,) = scorer.score_batch([sequences[0]])
    assert np.isnan(scores.logprobs[6:]).all()


def test_the_same_batch_scores_bitwise_the_same_twice(score: Callable[..., list[ScoredSequence]]) -> None:
    np.testing.assert_array_equal(flat(score("llama", Dtype.FP16)), flat(score("llama", Dtype.FP16)))


def test_logits_in_many_chunks_are_the_logits_in_one(
    monkeypatch: pytest.MonkeyPatch, score: Callable[..., list[ScoredSequence]]
) -> None:
    logprobs_of_all = flat(score("gemma2", Dtype.FP32))
    monkeypatch.setattr("mismatch_probe.training_path.batching._CHUNK_BYTES", 10 * 320 * 28)
    np.testing.assert_allclose(flat(score("gemma2", Dtype.FP32)), logprobs_of_all, atol=FP32_NOISE, rtol=0)


def test_logits_in_blocks_are_bitwise_those_of_a_whole_chunk(
    monkeypatch: pytest.MonkeyPatch, score: Callable[..., list[ScoredSequence]]
) -> None:
    def fields(dtype: Dtype) -> list[np.ndarray]:
        scores = score("gemma2", dtype)
        return [
            np.concatenate([getattr(one, name) for one in scores]) for name in ("logprobs", "top1_ids", "entropy_nats")
        ]

    for dtype in (Dtype.BF16, Dtype.FP32):
        monkeypatch.setattr(batching, "_BLOCK_LOGITS", 2**40)
        in_whole_chunks = fields(dtype)
        for num_logits in (1, 320 * 3, 320 * 7):
            monkeypatch.setattr(batching, "_BLOCK_LOGITS", num_logits)
            for in_blocks, in_chunks in zip(fields(dtype), in_whole_chunks, strict=True):
                np.testing.assert_array_equal(in_blocks, in_chunks)


def test_blocks_that_leave_a_token_out_are_seen(
    monkeypatch: pytest.MonkeyPatch, score: Callable[..., list[ScoredSequence]]
) -> None:
    at_once = flat(score("gemma2", Dtype.FP32))
    slices = batching._slices
    monkeypatch.setattr(batching, "_slices", lambda start, stop, size: slices(start, max(start, stop - 1), size))
    assert not np.array_equal(flat(score("gemma2", Dtype.FP32)), at_once)


def test_a_head_that_drops_the_models_soft_cap_is_caught_at_load(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint
) -> None:
    def bare_head(self: ChunkedHead, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(hidden)

    monkeypatch.setattr(ChunkedHead, "logits", bare_head)
    with pytest.raises(EngineError, match="Gemma2ForCausalLM gives other logits in chunks than in one pass"):
        Scorer.load(checkpoint("gemma2"), Dtype.FP32, TrainingPathSettings())


def test_a_response_of_no_tokens_has_no_scores(checkpoint: Checkpoint) -> None:
    with Scorer.load(checkpoint("llama"), Dtype.FP32, TrainingPathSettings()) as scorer:
        empty, scores = scorer.score_batch([TokenSequence("empty", [1], []), TokenSequence("one", [1, 2], [3])])
    assert len(empty.logprobs) == 0
    assert len(scores.logprobs) == 1
    assert scorer.score_batch([]) == []


def test_a_model_whose_head_is_its_base_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(EngineError, match="LlamaModel has no base model apart from its head"):
        ChunkedHead(model.model)


def _with_embedding(folder: Path, target: Path, token_id: int, value: float) -> Path:
    """A copy of a checkpoint in which one token's embedding is `value` throughout."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][token_id] = value
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
