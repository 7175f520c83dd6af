"""Does a sync tell whether the engine holds what it was sent? Each fault planted, and a sound engine beside it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.weight_digests import weight_digest
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.probe import logit_error
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.weight_sync import Draws, WeightSync
from tests.train.model_engine import ModelEngine

pytestmark = pytest.mark.usefixtures("process_group")


def make_sync(llama: Path, rollouts: list[Rollout], *faults: str) -> tuple[Policy, ModelEngine, WeightSync]:
    policy = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0)
    engine = ModelEngine(llama, *faults)
    return policy, engine, WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])


def move(policy: Policy, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.add_(torch.randn(local.shape, generator=generator) * size)


@pytest.mark.slow
def test_a_sound_sync_brings_both_sides_together_after_every_move(llama: Path, rollouts: list[Rollout]) -> None:
    policy, _, sync = make_sync(llama, rollouts)
    sync()
    for _ in range(3):
        move(policy, 0.01)
        found = sync()
        assert found["sync/engine_unchanged"] == 0
        assert found["sync/probe_k3"] < 1e-10
        assert found["update/policy_shift_k3"] > 1e-6


@pytest.mark.slow
def test_an_engine_that_keeps_its_old_weights_is_told_at_the_next_sync(llama: Path, rollouts: list[Rollout]) -> None:
    policy, _, sync = make_sync(llama, rollouts, "ignores_weights")
    assert sync()["sync/engine_unchanged"] == 0
    move(policy, 1e-4)
    assert sync()["sync/engine_unchanged"] == 1


@pytest.mark.slow
def test_sending_the_same_weights_again_does_not_clear_a_stale_engine(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts, "ignores_weights")
    sync()
    move(policy, 1e-4)
    sync()
    assert sync()["sync/engine_unchanged"] == 1
    engine.faults.clear()
    assert sync()["sync/engine_unchanged"] == 0


@pytest.mark.slow
def test_weights_that_did_not_change_are_no_sign_of_a_stale_engine(llama: Path, rollouts: list[Rollout]) -> None:
    _, _, sync = make_sync(llama, rollouts)
    sync()
    found = sync()
    assert found["sync/engine_unchanged"] == 0
    assert found["update/policy_shift_k3"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("moves_weights", [False, True])
def test_an_engine_is_stale_by_weights_that_moved_and_not_by_scores_of_pi_that_did(
    llama: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch, moves_weights: bool
) -> None:
    """As where the training path begins to score labels shifted by one, and no reward moves a weight."""
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    if moves_weights:
        engine.faults.add("ignores_weights")
        move(policy, 1e-4)
    true_scores = sync._probe_log_pi
    monkeypatch.setattr(sync, "_probe_log_pi", lambda: np.roll(true_scores(), 1))
    for _ in range(2):
        metrics = sync()
        assert metrics["sync/probe_k3"] > 1e-2
        assert metrics["sync/engine_unchanged"] == moves_weights


@pytest.mark.slow
def test_a_layer_perturbed_in_the_engine_shows_in_the_probe(llama: Path, rollouts: list[Rollout]) -> None:
    _, engine, sync = make_sync(llama, rollouts)
    sync()
    engine.perturbation = 0.05
    found = sync()
    assert found["sync/probe_k3_canary_ratio"] > 100


def draws_of(llama: Path, sharpness: float = 12.0) -> tuple[ModelEngine, Draws]:
    """Both sides with logits so many times as far apart, as a trained model's are."""
    policy, engine = Policy(llama, Dtype.FP32, PolicySettings(), temperature=1.0), ModelEngine(llama)
    with torch.no_grad():
        for model in (policy.module.model, engine.model):
            head = model.lm_head.weight
            (head.to_local() if hasattr(head, "to_local") else head).mul_(sharpness)
    prompts = [EncodedPrompt("prompt", list(range(5, 45)), "")]
    return engine, Draws.of_prompts(engine, policy, SamplingSettings(max_new_tokens=9), prompts, seed=0)


def test_tokens_are_drawn_behind_the_context_where_a_temperature_moves_them_most(llama: Path) -> None:
    engine, draws = draws_of(llama)
    context = draws.context.token_ids
    assert context == list(range(5, 5 + len(context)))
    with torch.no_grad():
        log_softmax = engine.model(torch.tensor([list(range(5, 21))])).logits[0].double().log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1, keepdim=True)
    variance = (log_softmax.exp() * (log_softmax + entropy) ** 2).sum(-1)
    assert len(context) == int(variance.argmax()) + 1
    assert draws.take()["sync/draw_surprise_error"] == pytest.approx(float(variance.max() / 64) ** 0.5, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "fires"), [(1.0, False), (0.7, True), (1.4, True)])
def test_draws_show_a_temperature_that_an_engine_hides(llama: Path, temperature: float, fires: bool) -> None:
    """A random model's log-probs vary a tenth as much as a trained one's, so it takes more steps here."""
    engine, draws = draws_of(llama)
    if temperature != 1:
        with torch.no_grad():
            engine.model.lm_head.weight.div_(temperature)
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "draws"))
    assert any(book.evaluate(step, draws.take()).events for step in range(1, 31)) == fires


def test_the_error_of_a_logit_is_found_whatever_the_probability_of_its_token() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((2000, 8)) + 8 * np.eye(8)[0] * random.random((2000, 1))
    wrong = logits + 1e-3 * random.standard_normal((2000, 8))
    log_pi, log_mu = (one[:, 0] - np.log(np.exp(one).sum(axis=1)) for one in (logits, wrong))
    median_of_normal = 0.6745
    against_the_others = median_of_normal * 1e-3 * np.sqrt(1 + 1 / 3)
    assert logit_error(log_pi, log_mu) == pytest.approx(against_the_others, rel=0.2)
    sure = log_pi > np.log(0.95)
    assert logit_error(log_pi[sure], log_mu[sure]) == pytest.approx(against_the_others, rel=0.2)


def test_tokens_that_a_router_sends_elsewhere_are_not_taken_for_wrong_weights() -> None:
    log_mu = np.log(np.random.default_rng(0).uniform(0.01, 0.9, 200))
    rounding = 1e-3 * np.random.default_rng(1).standard_normal(200)
    flipped = rounding.copy()
    flipped[::20] += 1.0
    clean, routed = logit_error(log_mu + rounding, log_mu), logit_error(log_mu + flipped, log_mu)
    assert routed < 1.3 * clean
    assert logit_error(log_mu + 20 * rounding, log_mu) > 10 * clean


@pytest.mark.slow
def test_a_restored_sync_compares_with_what_the_first_one_saw(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    saved = json.loads(json.dumps(sync.state()))
    move(policy, 0.01)
    expected = sync()
    again = WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])
    again.restore(saved)
    assert again() == expected


def weights(metrics: dict[str, float]) -> tuple[float, float, float]:
    unchanged, other, compared = (metrics[f"sync/weights_{name}"] for name in ("unchanged", "other", "compared"))
    return unchanged, other, compared


@pytest.mark.slow
def test_every_weight_of_a_sound_engine_is_compared_and_holds_what_was_sent(
    llama: Path, rollouts: list[Rollout]
) -> None:
    policy, _, sync = make_sync(llama, rollouts)
    for _ in range(3):
        assert weights(sync()) == (0, 0, 1)
        move(policy, 0.01)


@pytest.mark.slow
def test_a_layer_that_is_never_synced_is_told_by_its_digests(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    engine.keeps = "layers.0.mlp"
    assert weights(sync()) == (0, 0, 1)
    for _ in range(2):
        move(policy, 1e-4)
        assert weights(sync()) == (3, 0, 1)
    engine.keeps = ""
    assert weights(sync()) == (0, 0, 1)


def test_a_layer_that_is_sent_other_numbers_from_the_first_sync_on_is_told_too(
    llama: Path, rollouts: list[Rollout], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine loaded the checkpoint itself, which says what can be compared."""
    policy, engine, sync = make_sync(llama, rollouts)
    engine.perturbation = 0.01
    assert weights(sync()) == (0, 1, 1)
    assert "model.layers.0.mlp.down_proj.weight" in caplog.text
    move(policy, 1e-4)
    assert weights(sync()) == (0, 1, 1)


def test_weights_whose_names_are_not_known_are_not_judged(
    llama: Path, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy, engine, sync = make_sync(llama, rollouts, "ignores_weights")
    known = engine.held_weights
    monkeypatch.setattr(engine, "held_weights", lambda names: known([name for name in names if "norm" in name]))
    sync()
    move(policy, 1e-4)
    unchanged, other, compared = weights(sync())
    assert (unchanged, other) == (3, 0)
    assert 0 < compared < 0.1
    assert caplog.text.count("cannot be compared with what is sent") == 1


@pytest.mark.slow
def test_a_resumed_run_knows_which_weights_it_could_compare(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    saved = json.loads(json.dumps(sync.state()))
    move(policy, 0.01)
    again = WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])
    again.restore(saved)
    engine.keeps = "lm_head"
    assert weights(again()) == (0, 1, 1)


def test_a_tensor_of_any_format_has_a_digest() -> None:
    small = torch.arange(-4, 4).float()
    digests = [
        int(weight_digest(small.to(dtype)))
        for dtype in (torch.float8_e4m3fn, torch.int8, torch.int64, torch.float64, torch.float16)
    ]
    assert len({*digests, 0}) == 6


@pytest.mark.slow
def test_what_an_earlier_version_saved_of_a_sync_is_read(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    saved = json.loads(json.dumps(sync.state()))
    del saved["comparable"]
    for held in (saved["last"], saved["verified"]):
        held["fingerprint"] = [1, 2]
    move(policy, 0.01)
    again = WeightSync(policy, engine, Dtype.FP32, [rollout.sequence for rollout in rollouts[:4]])
    again.restore(saved)
    found = again()
    assert found["sync/engine_unchanged"] == 0
    assert weights(found) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digests_of_parts_add_up_whatever_the_order_and_the_padding(dtype: torch.dtype) -> None:
    complete_tensor = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    complete_tensor[0] = 0
    parts = [complete_tensor[:5], complete_tensor[5:].t(), torch.zeros(3, 8, dtype=dtype), -torch.zeros(2, dtype=dtype)]
    digest = int(weight_digest(complete_tensor))
    assert sum(int(weight_digest(part)) for part in parts) == digest
    swapped = complete_tensor.clone()
    swapped[1, 0], swapped[2, 0] = complete_tensor[1, 0] + 2**-6, complete_tensor[2, 0] - 2**-6
    assert int(weight_digest(swapped)) != digest


@pytest.mark.slow
def test_how_far_the_policy_moved_is_of_one_update_where_several_were_sent_unseen(
    llama: Path, rollouts: list[Rollout]
) -> None:
    policy, _, sync = make_sync(llama, rollouts)
    sync()
    move(policy, 0.01)
    sync.send(with_digests=False)
    move(policy, 0.0)
    found = sync()
    other_policy, _, other = make_sync(llama, rollouts)
    other()
    move(other_policy, 0.01)
    assert found["update/policy_shift_k3"] == pytest.approx(other()["update/policy_shift_k3"] / 2)
    assert found["sync/weights_other"] == found["sync/weights_unchanged"] == 0


@pytest.mark.slow
def test_weights_that_never_arrive_are_seen_at_the_next_check(llama: Path, rollouts: list[Rollout]) -> None:
    policy, engine, sync = make_sync(llama, rollouts)
    sync()
    engine.faults.add("ignores_weights")
    move(policy, 0.01)
    sync.send(with_digests=False)
    move(policy, 0.01)
    assert sync()["sync/weights_unchanged"] > 0
