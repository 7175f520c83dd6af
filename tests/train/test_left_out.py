"""What is in no loss is counted: truncated responses that are masked, and those that a guard drops."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.config.model import SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.actions import parse_action
from mismatch_probe.records.sequences import SampledSequence, SampleRequest
from mismatch_probe.train.learner import Adjustments
from tests.train.model_engine import ModelEngine
from tests.train.quick_runs import StoppingEngine, guard_file, quick_home, quick_settings, train

pytestmark = pytest.mark.filterwarnings("ignore")

TIGHTENS = (
    'name = "g"\nrule = "limit"\nmetric = "mismatch/kl_k3"\nabove = -1\nactions = ["tighten_sequences(0.5)", "log"]'
)


@pytest.mark.slow
@pytest.mark.parametrize(("truncated", "share"), [("masked", 1.0), ("wrong", 0.0)])
def test_truncated_responses_that_are_masked_are_counted(
    truncated: str, share: float, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch, ModelEngine)
    task = {"source": str(home / "problems.jsonl"), "reward": "lengths_as_rewards:even", "truncated": truncated}
    [step] = train(home / "run", quick_settings(llama, home, 1, task=task))
    assert step["response/truncated_share"] == 1
    assert step["correction/excluded_share"] == share


class ShiftedEngine(StoppingEngine):
    """Says of response k of a step that its first token was k * k / 10 nats less probable than it is."""

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        return [_shifted(one, 0.1 * k * k) for k, one in enumerate(super().sample(requests, sampling))]


def _shifted(sampled: SampledSequence, nats: float) -> SampledSequence:
    logprobs = sampled.scores.logprobs.copy()
    logprobs[0] -= nats
    return replace(sampled, scores=replace(sampled.scores, logprobs=logprobs))


@pytest.mark.slow
def test_responses_beyond_the_bound_of_a_guard_are_counted(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """abs(S) is 0, 0.1, 0.4, 0.9, 1.6, 2.5, 3.6 and 4.9 nats: three responses lie beyond half of the largest."""
    home = quick_home(tmp_path, monkeypatch, ShiftedEngine)
    before, after = train(home / "run", quick_settings(llama, home, 2, guards=guard_file(home, TIGHTENS)))
    assert before["correction/excluded_share"] == 0
    assert after["correction/excluded_share"] == 3 / 8


def test_responses_that_agree_to_the_last_bit_tighten_no_bound() -> None:
    """A bound of 0 would drop whatever rounds otherwise at a later step."""
    tighten = parse_action("tighten_sequences(0.5)")
    assert Adjustments().answering(tighten, [0.0] * 8).sequence_bound is None
    assert Adjustments().answering(tighten, [0.0] * 7 + [1e-6]).sequence_bound == 5e-7


@pytest.mark.slow
def test_a_guard_that_tightens_at_every_step_leaves_responses_to_learn_from(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = quick_home(tmp_path, monkeypatch)
    always = TIGHTENS.replace(', "log"', "")
    guards = guard_file(home, f"{always}\nwarmup = 1")
    steps = train(home / "run", quick_settings(llama, home, 12, guards=guards, infer_dtype=Dtype.BF16))
    assert max(step["correction/excluded_share"] for step in steps) < 1


@pytest.mark.slow
def test_a_response_whose_reward_is_no_number_is_left_out_and_the_others_are_learnt_from(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the default guards, which once skipped the update and at the third such step ended the run."""
    home = quick_home(tmp_path, monkeypatch)
    rewards = "import itertools\ncount = itertools.count()\n"
    rewards += "def one_lost(prompt, response, answer):\n"
    rewards += "    place = next(count)\n    return float('nan') if place % 8 == 3 else float(place % 2)\n"
    (home / "lost_rewards.py").write_text(rewards, encoding="utf-8")
    task = {"source": str(home / "problems.jsonl"), "num_problems": 8, "reward": "lost_rewards:one_lost"}
    task |= {"rewards_repeated": 0, "reward_workers": 1}
    steps = train(home / "run", quick_settings(llama, home, 4, task=task))
    assert [step["reward/nonfinite"] for step in steps] == [1] * 4
    assert [step["correction/excluded_share"] for step in steps] == [1 / 8] * 4
    assert all(step["optim/grad_norm"] > 0 for step in steps), "a gradient that is a number, and not 0"
    assert steps[1]["update/policy_shift_k3"] > 0, "the update was applied"
