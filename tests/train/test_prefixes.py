"""A state that sequences share is computed once, and everything comes out as if each had been computed alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.policy import Policy
from mismatch_probe.training_path.prefixes import SharedPrefixes, can_share_prefixes, share_prefixes, shared_attention
from tests.tiny_models import make_checkpoint

PROMPT, OTHER = [5, 6, 7], [5, 9]


def group() -> list[TokenSequence]:
    """Samples of two prompts that begin alike; longer than a sliding window, one twice, one a prefix of another."""
    random = np.random.default_rng(0)
    long = random.integers(0, 250, 40).tolist()
    responses = [long, long[:20] + random.integers(0, 250, 9).tolist(), [8], long, long[:12], [8, 3, 1]]
    return [TokenSequence(f"{row}", PROMPT, response) for row, response in enumerate(responses)] + [
        TokenSequence("other", OTHER, long[:15]),
        TokenSequence("short", OTHER[:1], [9]),
    ]


def log_probs_and_gradient(policy: Policy, *, shared: bool) -> tuple[np.ndarray, np.ndarray]:
    policy.shares_prefixes = shared
    with policy.computing():
        logprobs_T, _ = policy.logprobs(group())
        (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
    gradient = torch.cat([p.grad.full_tensor().flatten() for p in policy.trainable()])  # type: ignore[union-attr]
    for parameter in policy.trainable():
        parameter.grad = None
    return logprobs_T.detach().double().numpy(), gradient.double().numpy()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_every_prefix_has_one_state_and_every_sequence_finds_its_own() -> None:
    batch = share_prefixes(group())
    ids_U, positions_U = batch.input_ids_BS[0], batch.position_ids_BS[0]  # type: ignore[index]
    prefixes = batch.prefixes
    assert prefixes is not None
    prefix_of = {}
    for row in prefixes.states_RS.tolist():
        for place, state in enumerate(row):
            if positions_U[state] != place:
                break
            prefix_of[state] = tuple(ids_U[row[: place + 1]].tolist())
    inputs = [tuple((one.prompt_token_ids + one.token_ids)[:-1]) for one in group()]
    distinct = {one[: end + 1] for one in inputs for end in range(len(one))}
    assert len(prefix_of) == len(ids_U)
    assert sorted(prefix_of.values()) == sorted(distinct)
    questions = [
        (one[: len(sequence.prompt_token_ids) + place], target)
        for one, sequence in zip(inputs, group(), strict=True)
        for place, target in enumerate(sequence.token_ids)
    ]
    answered = list(zip(batch.states_Q.tolist(), batch.targets_Q.tolist(), strict=True))
    assert [(prefix_of[answered[q][0]], answered[q][1]) for q in batch.questions_T.tolist()] == questions
    assert len(answered) == len(set(questions))
    flat = prefixes.states_RS.flatten()
    assert flat[prefixes.places_U].tolist() == list(range(len(ids_U)))


def test_sequences_that_others_continue_have_no_row_in_attention() -> None:
    prefixes = share_prefixes(group()).prefixes
    assert prefixes is not None
    assert len(prefixes.states_RS) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-moe", "mistral-sliding"])
def test_log_probs_and_gradient_are_those_of_sequences_one_by_one(family: str, tmp_path: Path) -> None:
    policy = Policy(make_checkpoint(tmp_path / family, family), Dtype.FP32, PolicySettings(), temperature=0.7)
    assert policy.effective_settings()["shares_prefixes"]
    logprobs, gradient = log_probs_and_gradient(policy, shared=True)
    padded_logprobs, padded_gradient = log_probs_and_gradient(policy, shared=False)
    assert np.abs(logprobs - padded_logprobs).max() < 1e-5
    assert distance(gradient, padded_gradient) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_sixteen_bits_are_as_near_to_the_true_gradient_as_without_sharing(dtype: Dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3")
    _, truth = log_probs_and_gradient(Policy(folder, Dtype.FP32, PolicySettings(), temperature=1.0), shared=False)
    policy = Policy(folder, dtype, PolicySettings(), temperature=1.0)
    errors = [distance(log_probs_and_gradient(policy, shared=shared)[1], truth) for shared in (True, False)]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_layers_that_are_computed_again_have_the_same_gradient(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    settings = PolicySettings(), PolicySettings(gradient_checkpointing=True)
    kept, again = (
        log_probs_and_gradient(Policy(folder, Dtype.FP32, setting, temperature=1.0), shared=True)[1]
        for setting in settings
    )
    assert np.array_equal(kept, again)


@pytest.mark.usefixtures("process_group")
def test_the_body_computes_as_many_states_as_there_are_prefixes(tmp_path: Path) -> None:
    policy = Policy(make_checkpoint(tmp_path / "llama", "llama"), Dtype.FP32, PolicySettings(), temperature=1.0)
    seen = []
    embeddings = policy.module.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    with torch.no_grad(), policy.computing():
        policy.logprobs(group())
    inputs = [tuple((one.prompt_token_ids + one.token_ids)[:-1]) for one in group()]
    assert seen[0] == len({one[: end + 1] for one in inputs for end in range(len(one))})


def load(folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def test_a_model_that_mixes_tokens_outside_attention_is_left_as_it_is(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "llama", "llama"))
    layer = model.base_model.layers[0]  # type: ignore[index,union-attr]
    shift = layer.mlp.register_forward_hook(lambda _, __, output: output + 0.1 * output.roll(1, dims=1))  # type: ignore[union-attr]
    assert not can_share_prefixes(model)
    assert model.config._attn_implementation == "sdpa"
    shift.remove()
    assert can_share_prefixes(model)


def test_a_model_that_scales_attention_by_the_place_in_the_inputs_is_left_as_it_is(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / "llama", "llama"))
    model.config.attn_temperature_tuning = True
    assert not can_share_prefixes(model)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_other_attention_than_sdpa_stays(family: str, tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path / family, family), "eager")
    assert not can_share_prefixes(model)
    assert model.config._attn_implementation == "eager"


def test_a_value_that_many_rows_share_has_the_sum_of_their_gradients_in_sixteen_bits() -> None:
    """With queries of 0 the second state of each of 1,000 rows takes half of the value they share."""
    num_rows = 1000
    own = torch.arange(1, num_rows + 1)
    states_RS = torch.stack([torch.zeros_like(own), own], dim=1)
    places_U = torch.cat([torch.zeros(1, dtype=torch.long), 2 * torch.arange(num_rows) + 1])
    query, key, value = (torch.zeros(1, 1, num_rows + 1, 8, dtype=torch.bfloat16) for _ in range(3))
    value.requires_grad_()
    output, _ = shared_attention(torch.nn.Module(), query, key, value, None, SharedPrefixes(states_RS, places_U))
    output.sum().backward()
    assert value.grad is not None
    assert value.grad[0, 0, 0].tolist() == pytest.approx([1 + num_rows / 2] * 8, rel=2**-7)
