"""Metrics of simulated runs with the noise of real ones, clean or with a fault from one step on."""

from collections.abc import Callable, Iterator

import numpy as np

Metrics = dict[str, float]
Fault = Callable[[Metrics, int], None]

LEVELS_K3 = {"bf16": 3e-5, "fp16": 4e-7, "fp32": 1e-11}
LOGIT_ERRORS = {"bf16": 8e-4, "fp16": 1.2e-4, "fp32": 5e-6}
GROWTH_INTERVAL = 25


class Run:
    """One simulated run: `canary()`, then `steps()`; `fault(metrics, age)` changes the metrics from step `onset` on.

    k3 rises fivefold in the first 60 steps as the policy sharpens, with lognormal noise and rare spikes of 8, of 20 on
    the probe; entropy falls from 0.3 to 0.05; the gradient norm varies threefold; FP16 overflows once after a growth of
    its scale; once the reward is 1 in a whole batch, loss and gradient are exactly 0.
    """

    def __init__(self, dtype: str, seed: int, fault: Fault | None = None, onset: int = 30) -> None:
        self._dtype = dtype
        self._random = np.random.default_rng([seed, sorted(LEVELS_K3).index(dtype)])
        self._fault = fault
        self._onset = onset
        self._scale = 1024.0 if dtype == "fp16" else 1.0
        self._since_growth = 0

    def canary(self) -> Metrics:
        return {name: value for name, value in self._clean(1).items() if name.startswith(("mismatch/", "sync/"))}

    def steps(self, number: int) -> Iterator[tuple[int, Metrics]]:
        for step in range(1, number + 1):
            metrics = self._clean(step)
            if self._fault is not None and step >= self._onset:
                self._fault(metrics, step - self._onset)
            yield step, metrics

    def _noise(self, spread: float) -> float:
        return float(np.exp(self._random.normal(0, spread)))

    def _clean(self, step: int) -> Metrics:
        course = min(1.0, step / 60)
        k3 = LEVELS_K3[self._dtype] * 5**course * self._noise(0.5) * (8 if self._random.random() < 0.005 else 1)
        probe_k3 = LEVELS_K3[self._dtype] * 5**course * self._noise(0.4) * (20 if self._random.random() < 0.005 else 1)
        rms = float(np.sqrt(2 * k3))
        accuracy = min(1.0, max(0.0, 0.54 + 0.45 * course + self._random.normal(0, 0.05)))
        overflow = self._overflows()
        extreme = min(0.5, 25 * rms * self._noise(0.2))
        saturated = accuracy == 1.0
        return {
            "mismatch/kl_k3": k3,
            "mismatch/kl_k3_error": k3 / 5,
            "mismatch/logprob_diff_rms": rms,
            "mismatch/prob_diff_max": extreme,
            "mismatch/prob_diff_min": -extreme * self._noise(0.2),
            "mismatch/ess_token": 1 / (1 + 2 * k3),
            "mismatch/temperature_fit": 1 + self._random.normal(0, min(0.02, rms)),
            "mismatch/surprise_excess": 0.0,
            "mismatch/surprise_mean": 0.0,
            "mismatch/surprise_error": 0.01,
            "mismatch/is_ratio_mean_error": rms / 50,
            "mismatch/is_ratio_mean": 1 + self._random.normal(0, rms / 50),
            "reward/mean": accuracy,
            "reward/mean_error": 0.05,
            "reward/largest": 1.0,
            "reward/typical": 1.0,
            "reward/whole_range": 1.0,
            "reward/std": float(np.sqrt(accuracy * (1 - accuracy))),
            "reward/flat_groups_share": 1.0 if saturated else 0.3,
            "reward/nonfinite": 0.0,
            "reward/late": 0.0,
            "reward/unrepeated": 0.0,
            "reward/mispaired": 0.0,
            "reward/mispaired_error": 0.0,
            "time/reward_seconds": 0.2,
            "response/unended_share": 0.0,
            "response/length_mean": 30.0,
            "response/repeats": 0.0,
            "response/returned_after": 0.0,
            "response/steps_not_new": 0.0,
            "mismatch/copied_share": 0.0,
            "mismatch/copied_rows_share": 0.0,
            "response/truncated_share": 0.3 * (1 - course),
            "policy/entropy": 0.3 * (0.05 / 0.3) ** course * self._noise(0.1),
            "correction/rejected_share": 0.02 * self._noise(0.3),
            "correction/clipped_share": 0.0,
            "optim/grad_norm": 0.0 if saturated else float("inf") if overflow else 0.5 * self._noise(0.5),
            "optim/loss": 0.0 if saturated else self._random.normal(0, 0.01),
            "optim/loss_scale": self._scale,
            "optim/overflow": float(overflow),
            "optim/overflows_in_a_row": float(overflow),
            "optim/nonfinite_gradients": 0.0,
            "optim/learning_rate": 1e-4 * min(1.0, step / 10),
            "sync/engine_unchanged": 0.0,
            "sync/draw_surprise_mean": self._random.normal(0, 0.4),
            "sync/draw_surprise_error": 0.4,
            "sync/weights_unchanged": 0.0,
            "sync/weights_other": 0.0,
            "sync/probe_k3": probe_k3,
            "sync/probe_logit_error": LOGIT_ERRORS[self._dtype] * self._noise(0.12),
            "update/policy_shift_k3": 0.0 if step == 1 else 2e-3 * min(1.0, step / 10) ** 2 * self._noise(0.6),
            "update/policy_shift_farthest": 0.0,
        }

    def _overflows(self) -> bool:
        """Once after each growth, where the new scale is too large."""
        if self._dtype != "fp16":
            return False
        self._since_growth += 1
        if self._since_growth == GROWTH_INTERVAL:
            self._scale *= 2
        if self._since_growth == GROWTH_INTERVAL + 1:
            self._scale /= 2
            self._since_growth = 0
            return True
        return False


def sync_skipped(metrics: Metrics, age: int) -> None:
    metrics["sync/engine_unchanged"] = 1.0
    metrics["mismatch/kl_k3"] += 2e-3 * (age + 1)


def last_layer_never_synced(metrics: Metrics, age: int) -> None:
    """In BF16 nothing else moves beyond its noise."""
    metrics["sync/weights_unchanged"] = 6.0


def one_layer_a_hundredth_off(metrics: Metrics, age: int) -> None:
    metrics["sync/weights_other"] = 6.0


def temperature_on_one_side(metrics: Metrics, age: int) -> None:
    metrics["mismatch/temperature_fit"] *= 1.3
    metrics["mismatch/kl_k3"] += 0.02


def sampled_at_another_temperature(metrics: Metrics, age: int) -> None:
    """With log-probs that do not show it."""
    metrics["mismatch/surprise_excess"] = 0.05
    metrics["mismatch/surprise_mean"] = 0.08


def unsure_tokens_at_another_temperature(metrics: Metrics, age: int) -> None:
    """As SmolLM2's at 0.7: few tokens of responses, most of them sure, show nothing yet."""
    metrics["sync/draw_surprise_mean"] += 2.9


def end_tokens_dropped(metrics: Metrics, age: int) -> None:
    metrics["response/unended_share"] = 0.9


def tenfold_rewards(metrics: Metrics, age: int) -> None:
    for name in ("mean", "largest", "typical", "std", "mean_error"):
        metrics[f"reward/{name}"] = 40 * metrics[f"reward/{name}"]


def one_layer_perturbed(metrics: Metrics, age: int) -> None:
    """As measured with noise of a fifth."""
    metrics["sync/probe_logit_error"] += 0.013
    for name in ("mismatch/kl_k3", "sync/probe_k3"):
        metrics[name] += 0.1


def one_layer_perturbed_a_little(metrics: Metrics, age: int) -> None:
    """As measured with noise of a twentieth."""
    metrics["sync/probe_logit_error"] += 0.003
    metrics["sync/probe_k3"] *= 20


def one_probe_token_routed_elsewhere(metrics: Metrics, age: int) -> None:
    """As measured on a mixture of experts: of a hundred tokens one goes to another expert."""
    metrics["sync/probe_k3"] += 0.1


def reward_nan(metrics: Metrics, age: int) -> None:
    metrics["reward/nonfinite"] = 3.0
    metrics["reward/mean"] = metrics["optim/loss"] = float("nan")
    overflow_each_step(metrics, age)


def reward_late(metrics: Metrics, age: int) -> None:
    reward_nan(metrics, age)
    metrics["reward/late"] = 3.0
    metrics["time/reward_seconds"] = 60.0


def learning_rate_times_100(metrics: Metrics, age: int) -> None:
    """As the optimizer reports it, and as it shows in the policy one step later."""
    metrics["optim/learning_rate"] *= 100
    applied_unseen_times_100(metrics, age)


def applied_unseen_times_100(metrics: Metrics, age: int) -> None:
    """A hundred times the step without a rate that says so."""
    if age > 0:
        metrics["update/policy_shift_k3"] = min(3.0, 1e4 * max(metrics["update/policy_shift_k3"], 1e-4))
        metrics["reward/mean"] = 0.05


def overflow_each_step(metrics: Metrics, age: int) -> None:
    metrics["optim/grad_norm"] = float("inf")
    metrics["optim/nonfinite_gradients"] = float(metrics["optim/loss_scale"] == 1)
    metrics["optim/overflow"] = 1.0
    metrics["optim/overflows_in_a_row"] = age + 1.0
    metrics["optim/loss_scale"] *= 0.5**age


def dead_fp16(metrics: Metrics, age: int) -> None:
    metrics["optim/loss"] = metrics["optim/grad_norm"] = 0.0
    metrics["reward/mean"] = metrics["mismatch/kl_k3"] = float("nan")


def all_truncated(metrics: Metrics, age: int) -> None:
    """Every answer is cut before it ends, earns nothing, and moves nothing."""
    metrics["response/truncated_share"] = 1.0
    metrics["reward/mean"] = metrics["optim/loss"] = metrics["optim/grad_norm"] = 0.0
