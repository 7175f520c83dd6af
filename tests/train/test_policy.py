"""pi in training: the same numbers as the training path, the right gradient, weights as the checkpoint names them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.config.train import LoraSettings, PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.sharded import merged_parameters
from mismatch_probe.training_path import Scorer, plan_batches
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("process_group")


def sequences(rollouts: list[Rollout]) -> list[TokenSequence]:
    return [rollout.sequence for rollout in rollouts]


def logprobs(policy: Policy, batch: list[TokenSequence]) -> np.ndarray:
    with torch.no_grad(), policy.computing():
        return policy.logprobs(batch)[0].double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16, Dtype.FP16])
def test_log_probs_are_those_compare_measures_for_fsdp(dtype: Dtype, llama: Path, rollouts: list[Rollout]) -> None:
    """Bit for bit, where both compute the same sequences in one pass: a product's rounding depends on its rows.

    `test_shared_rounding` holds shared prefixes against the padded sequences that are computed here.
    """
    batch = sequences(rollouts)
    passes = plan_batches([one.num_tokens for one in batch], batch_tokens=10_000)
    policy = Policy(llama, dtype, PolicySettings(), temperature=0.7)
    policy.shares_prefixes = False
    with Scorer.load(llama, dtype, TrainingPathSettings(precision="fsdp"), temperature=0.7) as scorer:
        for rows in passes:
            together = [batch[row] for row in rows]
            scored = np.concatenate([one.logprobs for one in scorer.score_batch(together)])
            assert np.array_equal(logprobs(policy, together), scored)


@pytest.mark.slow
def test_the_gradient_is_that_of_whole_logits(llama: Path, rollouts: list[Rollout]) -> None:
    from transformers import AutoModelForCausalLM

    batch = sequences(rollouts)[:1]
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    with policy.computing():
        policy.logprobs(batch)[0].sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    ids = torch.tensor([batch[0].prompt_token_ids + batch[0].token_ids])
    first = len(batch[0].prompt_token_ids)
    log_softmax = plain(ids).logits[0].log_softmax(-1)
    log_softmax[first - 1 : -1].gather(-1, ids[0, first:, None]).sum().backward()
    found = {name.removeprefix("model."): p.grad for name, p in policy.module.named_parameters()}
    for name, parameter in plain.named_parameters():
        gradient = found[name].full_tensor()  # type: ignore[union-attr]
        assert torch.allclose(gradient, parameter.grad, atol=1e-4, rtol=1e-3), name


@pytest.mark.slow
def test_chunks_of_logits_change_neither_log_probs_nor_gradient(
    llama: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chunk_bytes in (2**28, 8 * 320 * 5):
        monkeypatch.setattr("mismatch_probe.train.policy._CHUNK_BYTES", chunk_bytes)
        policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
        with policy.computing():
            values, _ = policy.logprobs(sequences(rollouts))
            values.sum().backward()
        gradients = torch.cat([p.grad.full_tensor().flatten() for p in policy.trainable()])  # type: ignore[union-attr]
        found.append((values.detach(), gradients))
    (values, gradients), (chunked_values, chunked_gradients) = found
    assert torch.allclose(values, chunked_values, atol=1e-6)
    assert torch.allclose(gradients, chunked_gradients, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe"])
def test_weights_come_whole_under_the_names_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / family, family)
    stored = load_file(folder / "model.safetensors")
    sent = dict(Policy(folder, Dtype.FP16, PolicySettings(), temperature=1.0).weights())
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name].float()) for name in stored)


def test_weights_are_the_masters_after_a_forward_pass_too(llama: Path, rollouts: list[Rollout]) -> None:
    policy = Policy(llama, Dtype.BF16, PolicySettings(), temperature=1.0)
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.mul_(1 + 2**-12)
    before = dict(policy.weights())
    logprobs(policy, sequences(rollouts))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())


def test_a_saved_policy_loads_as_the_checkpoint_it_came_from(llama: Path, tmp_path: Path) -> None:
    Policy(llama, Dtype.BF16, PolicySettings(), temperature=1.0).save(tmp_path / "saved")
    stored, saved = load_file(llama / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], stored[name].float()) for name in stored)


@pytest.mark.slow
def test_fresh_adapters_leave_log_probs_and_weights_as_they_are(llama: Path, rollouts: list[Rollout]) -> None:
    plain = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    adapted = Policy(llama, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4)), temperature=1.0)
    assert np.allclose(logprobs(plain, sequences(rollouts)), logprobs(adapted, sequences(rollouts)), atol=1e-6)
    before, after = dict(plain.weights()), dict(adapted.weights())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_merged_adapters_compute_what_adapters_beside_the_weights_compute(
    llama: Path, rollouts: list[Rollout], tmp_path: Path
) -> None:
    adapted = Policy(llama, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4, alpha=16)), temperature=1.0)
    with torch.no_grad():
        for parameter in adapted.trainable():
            torch.nn.init.normal_(parameter.to_local(), std=0.1, generator=torch.Generator().manual_seed(1))  # type: ignore[attr-defined]
    adapted.save(tmp_path / "merged")
    merged = Policy(tmp_path / "merged", Dtype.FP32, PolicySettings(), temperature=1.0)
    beside, inside = logprobs(adapted, sequences(rollouts)), logprobs(merged, sequences(rollouts))
    unadapted = logprobs(Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0), sequences(rollouts))
    assert np.abs(beside - inside).max() < 1e-4
    assert np.abs(beside - unadapted).max() > 1e-2


def test_only_adapters_are_trained(llama: Path) -> None:
    policy = Policy(llama, Dtype.FP32, PolicySettings(lora=LoraSettings(rank=4)), temperature=1.0)
    trained = [name for name, parameter in policy.module.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    assert len(list(merged_parameters(policy.module.model))) == len(load_file(llama / "model.safetensors"))


@pytest.mark.slow
def test_checkpointed_gradients_leave_dropout_off(rollouts: list[Rollout], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama", attention_dropout=0.5)
    policy = Policy(folder, Dtype.FP32, PolicySettings(gradient_checkpointing=True), temperature=1.0)
    with policy.computing():
        first, second = (policy.logprobs(sequences(rollouts))[0].detach() for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.slow
def test_checkpointed_gradients_are_the_same_gradients(llama: Path, rollouts: list[Rollout]) -> None:
    found = []
    for checkpointing in (False, True):
        policy = Policy(llama, Dtype.FP32, PolicySettings(gradient_checkpointing=checkpointing), temperature=1.0)
        with policy.computing():
            policy.logprobs(sequences(rollouts))[0].sum().backward()
        found.append(torch.cat([p.grad.full_tensor().flatten() for p in policy.trainable()]))  # type: ignore[union-attr]
    assert torch.allclose(*found, atol=1e-5)
