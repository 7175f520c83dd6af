import math

import pytest
import torch

from mismatch_probe.training_path.batching import score_logits


def scored(logits: torch.Tensor, targets: list[int], temperature: float = 1, dtype: torch.dtype = torch.float32):
    return score_logits(logits, torch.tensor(targets), temperature=temperature, log_softmax_dtype=dtype)


def test_scores_are_those_of_the_tempered_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    scores = scored(logits, [1, 2], temperature=2, dtype=torch.float64)
    weights = [math.exp(0.5), math.exp(1.0), math.exp(2.0)]
    probabilities = [weight / sum(weights) for weight in weights]
    assert scores.logprobs_T.tolist() == pytest.approx([math.log(probabilities[1]), -math.log(3)])
    assert scores.entropy_nats_T.tolist() == pytest.approx([-sum(p * math.log(p) for p in probabilities), math.log(3)])
    assert scores.top1_ids_T[0] == 2


def test_a_forbidden_token_adds_nothing_to_the_entropy() -> None:
    scores = scored(torch.tensor([[0.0, 0.0, -math.inf]]), [2])
    assert scores.logprobs_T[0] == -math.inf
    assert scores.entropy_nats_T[0] == pytest.approx(math.log(2))


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_not_hidden(fault: float) -> None:
    scores = scored(torch.tensor([[0.0, fault, 1.0], [0.0, 1.0, 2.0]]), [1, 1])
    assert not scores.logprobs_T[0].isfinite()
    assert not scores.entropy_nats_T[0].isfinite()
    assert scores.logprobs_T[1].isfinite()


def test_a_log_softmax_in_16_bit_errs_where_fp32_does_not() -> None:
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = [0] * 200
    exact = scored(logits, targets, dtype=torch.float64).logprobs_T
    in_fp32 = scored(logits, targets, dtype=torch.float32).logprobs_T
    in_bf16 = scored(logits, targets, dtype=torch.bfloat16).logprobs_T
    assert in_fp32.dtype == in_bf16.dtype == torch.float32
    assert (in_fp32 - exact).abs().max() < 1e-6
    assert (in_bf16 - exact).abs().max() > 1e-3


def test_scores_do_not_depend_on_autocast() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    plain = scored(logits, [3] * 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = scored(logits, [3] * 20)
    assert torch.equal(plain.logprobs_T, under_autocast.logprobs_T)
    assert torch.equal(plain.entropy_nats_T, under_autocast.entropy_nats_T)
