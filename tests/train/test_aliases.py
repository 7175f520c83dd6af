"""Each name of another framework is the number that this framework would log: its own formulas, written out."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.train.parts import response_metrics
from mismatch_probe.train.rollouts import Rollout
from mismatch_probe.train.trackers import ALIASES, with_aliases
from tests.report.training.training_runs import TrainingSample, step_metrics

SAFETY_BOUND = 20.0
LENGTHS = (5, 1, 9, 4, 7, 7, 2, 12)


class Batch:
    """Log-probs as those frameworks hold them: padded [B, S] with a mask, padding that would be seen if it counted."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.log_mu = [-random.exponential(1.0, length) for length in LENGTHS]
        self.log_pi = [np.minimum(one + random.normal(0, 0.3, len(one)), 0) for one in self.log_mu]
        self.entropy = [random.uniform(0.1, 2, length) for length in LENGTHS]
        shape = (len(LENGTHS), max(LENGTHS))
        self.mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
        self.rollout, self.old, self.entropies = (
            self._padded(values) for values in (self.log_mu, self.log_pi, self.entropy)
        )

    def _padded(self, values: list[np.ndarray]) -> torch.Tensor:
        found = torch.full(self.mask.shape, 9.0, dtype=torch.float64)
        for row, one in enumerate(values):
            found[row, : len(one)] = torch.from_numpy(one)
        return found

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.mask].sum() / self.mask.sum()

    def mean_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, values, 0.0).sum(1) / self.mask.sum(1)

    def sum_of_rows(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, values, 0.0).sum(1)

    def logged(self) -> dict[str, float]:
        rollouts = [
            Rollout(TokenSequence(f"row-{row}", [1], [1] * len(one)), one, f"prompt-{row // 2}", 1.0, False, "")
            for row, one in enumerate(self.log_mu)
        ]
        return with_aliases(response_metrics(rollouts, np.concatenate(self.log_pi), np.concatenate(self.entropy)))


def log_ppl_diff(batch: Batch) -> torch.Tensor:
    return batch.mean_of_rows(batch.rollout) - batch.mean_of_rows(batch.old)


def k3(batch: Batch) -> torch.Tensor:
    log_ratio = batch.old - batch.rollout
    return torch.exp(log_ratio) - log_ratio - 1


def probability_difference(batch: Batch) -> torch.Tensor:
    return torch.abs(torch.exp(batch.old) - torch.exp(batch.rollout))[batch.mask]


FORMULAS: dict[str, Callable[[Batch], torch.Tensor]] = {
    "rollout_corr/kl": lambda batch: batch.mean(batch.rollout - batch.old),
    "rollout_corr/k3_kl": lambda batch: batch.mean(k3(batch)),
    "rollout_corr/log_ppl_diff": lambda batch: log_ppl_diff(batch).mean(),
    "rollout_corr/ppl_ratio": lambda batch: torch.exp(log_ppl_diff(batch)).mean(),
    "rollout_corr/chi2_token": lambda batch: (
        batch.mean(torch.exp(torch.clamp(batch.old - batch.rollout, -SAFETY_BOUND, SAFETY_BOUND)).square()) - 1
    ),
    "rollout_corr/chi2_seq": lambda batch: (
        torch.exp(2 * torch.clamp(batch.sum_of_rows(batch.old - batch.rollout), -SAFETY_BOUND, SAFETY_BOUND)).mean() - 1
    ),
    "training/rollout_probs_diff_mean": lambda batch: torch.mean(probability_difference(batch)),
    "training/rollout_probs_diff_max": lambda batch: torch.max(probability_difference(batch)),
    "training/rollout_actor_probs_pearson_corr": lambda batch: torch.corrcoef(
        torch.stack([torch.exp(batch.old)[batch.mask], torch.exp(batch.rollout)[batch.mask]])
    )[0][1],
    "actor/entropy": lambda batch: batch.mean(batch.entropies),
    "sampling/sampling_logp_difference/mean": lambda batch: torch.abs(batch.old - batch.rollout)[batch.mask].mean(),
    "sampling/sampling_logp_difference/max": lambda batch: torch.abs(batch.old - batch.rollout)[batch.mask].max(),
    "entropy": lambda batch: (batch.entropies * batch.mask).sum() / batch.mask.sum(),
    "train/token_mult_prob_error": lambda batch: batch.mean(torch.exp(torch.abs(batch.rollout - batch.old))),
    "train/gen_kl_error": lambda batch: batch.mean(
        torch.exp(batch.old - batch.rollout) - 1 - (batch.old - batch.rollout)
    ),
    "mismatch_kl/all/mean": lambda batch: k3(batch)[batch.mask].mean(),
    "kl_ent_ratio/mean": lambda batch: k3(batch)[batch.mask].mean() / batch.entropies[batch.mask].mean(),
    "entropy/all/mean": lambda batch: batch.entropies[batch.mask].mean(),
    "train/train_rollout_logprob_abs_diff": lambda batch: batch.mean_of_rows(
        torch.abs(batch.old - batch.rollout)
    ).mean(),
}
"""As in the sources that `ALIASES` names: masks, clamps and means of theirs."""

OURS_BY_ANOTHER_NAME = (
    *("actor/grad_norm", "actor/lr", "grad_norm", "learning_rate", "train/grad_norm", "train/lr", "optim/lr"),
    *("train/lr-pg_0", "timing_s/step", "time/step"),
)
"""Read off an optimizer or a clock: nothing to define."""

REWARDS = np.array([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
OF_RESPONSES = {
    "critic/rewards/mean": REWARDS.mean(),
    "reward": np.nanmean(REWARDS),
    "train/reward": REWARDS.mean(),
    "frac_reward_zero_std": float(np.isclose(REWARDS.std(axis=1, ddof=1), 0).mean()),
    "response_length/mean": 4.0,
    "completions/mean_length": 4.0,
    "response_length/max": 8.0,
    "completions/max_length": 8.0,
    "completions/clipped_ratio": 0.25,
}
"""Of three prompts with four responses each, of 2, 4, 8 and 2 tokens, the third of them cut at the limit."""


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


@pytest.mark.parametrize("name", FORMULAS)
def test_an_alias_is_what_its_framework_computes(name: str, batch: Batch) -> None:
    assert batch.logged()[name] == pytest.approx(float(FORMULAS[name](batch)), rel=1e-9)


def test_every_alias_is_held_against_its_definition() -> None:
    names = {alias for framework in ALIASES.values() for alias in framework}
    assert names == {*FORMULAS, *OURS_BY_ANOTHER_NAME, *OF_RESPONSES}


def test_an_alias_of_responses_is_what_its_framework_counts() -> None:
    lengths = (2, 4, 8, 2)
    rollouts = [
        Rollout(
            sequence=TokenSequence(f"{prompt}/{sample}", [1], [1] * lengths[sample]),
            mu_logprobs=np.full(lengths[sample], -0.5),
            prompt_id=str(prompt),
            reward=REWARDS[prompt, sample],
            truncated=sample == 2,
            text="",
        )
        for prompt in range(3)
        for sample in range(4)
    ]
    log_pi = np.concatenate([rollout.mu_logprobs for rollout in rollouts])
    logged = with_aliases(response_metrics(rollouts, log_pi, np.zeros(len(log_pi))))
    assert {name: logged[name] for name in OF_RESPONSES} == pytest.approx(OF_RESPONSES)


def test_no_name_means_two_things() -> None:
    meanings = {(alias, own) for framework in ALIASES.values() for alias, own in framework.items()}
    assert max(Counter(alias for alias, _ in meanings).values()) == 1


def test_aliases_come_beside_our_names_and_carry_the_same_value() -> None:
    metrics = step_metrics(1, TrainingSample())
    found = with_aliases(metrics)
    assert metrics.items() <= found.items()
    assert found["rollout_corr/k3_kl"] == metrics["mismatch/kl_k3"]
    assert found["completions/mean_length"] == metrics["response/length_mean"]


def test_a_metric_that_a_step_lacks_has_no_alias() -> None:
    assert with_aliases({"mismatch/kl_k3": 1.0}).keys() == {
        *("mismatch/kl_k3", "rollout_corr/k3_kl", "train/gen_kl_error", "mismatch_kl/all/mean")
    }


def test_a_formula_of_another_convention_would_be_noticed(batch: Batch) -> None:
    """The mean of per-response means and the mean over tokens are not each other."""
    logged = batch.logged()
    assert logged["train/train_rollout_logprob_abs_diff"] != pytest.approx(
        logged["sampling/sampling_logp_difference/mean"], rel=1e-3
    )
