"""What metrics and guards cost of a step of usual size, from the clock phases of a real run."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from benchmarks.training_faults.injection import Now, replaced, swapped
from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.runs import run_with, small_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.training_run import TrainingDirectory
from mismatch_probe.train.parts import TrainingParts

STEPS: Final = 8
WARM_UP: Final = 2
ROLLOUT: Final = {"prompts": 32, "samples": 8, "max_new_tokens": 64}
PHASES: Final = ("probe", "digest", "measure", "guards")
_REPEATS: Final = 9


@dataclass(frozen=True)
class Cost:
    """Seconds, medians over steps. `parts` are phases of the clock, and what hides in others, timed apart."""

    dtype: Dtype
    step_seconds: float
    parts: dict[str, float]
    response_tokens: float

    @property
    def share(self) -> float:
        return sum(self.parts.values()) / self.step_seconds


def cost(dtype: Dtype, scratch: Path, until: float = float("inf")) -> Cost:
    """Run it, or read what came of it before. Raises as `kept_or_made`."""
    path = scratch / "outcomes" / f"cost-{dtype}.json"
    return Cost(**kept_or_made(path, lambda: asdict(_measured(dtype, scratch / "runs" / f"cost-{dtype}")), until))


def _measured(dtype: Dtype, path: Path) -> Cost:
    differences: dict[str, float] = {}
    written: list[float] = []

    def time_apart(parts: TrainingParts, now: Now) -> None:
        def make(sample: Callable[[int], Any]) -> Callable[[int], Any]:
            def then_time(step: int) -> Any:
                rollouts = sample(step)
                if now.step == WARM_UP:
                    tokens = sum(rollout.length for rollout in rollouts)
                    differences["entropies"] = _entropy_seconds(tokens, parts.policy.vocab_size)
                return rollouts

            return then_time

        replaced(parts.rollouts, "sample", make)

    def timed(append: Callable[..., None]) -> Callable[..., None]:
        def append_timed(*arguments: Any) -> None:
            start = time.perf_counter()
            append(*arguments)
            written.append(time.perf_counter() - start)

        return append_timed

    settings = small_settings(dtype, seed=0, steps=STEPS, rollout=ROLLOUT)
    with swapped(TrainingDirectory, "append_metrics", timed):
        run = run_with(path, settings, time_apart)
    steps = [values for step, values in run.metrics.items() if step > WARM_UP]
    phases = {phase: median(values[f"time/{phase}_seconds"] for values in steps) for phase in PHASES}
    return Cost(
        dtype=dtype,
        step_seconds=median(values["time/step_seconds"] for values in steps),
        parts={**phases, "metrics.jsonl": median(written), **differences},
        response_tokens=median(values["response/length_mean"] for values in steps)
        * ROLLOUT["prompts"]
        * ROLLOUT["samples"],
    )


def _entropy_seconds(num_tokens: int, vocab_size: int) -> float:
    """The training path's own expression on a step's tokens."""
    log_probs = torch.randn(num_tokens, vocab_size).log_softmax(-1)
    return _seconds(lambda: torch.special.entr(log_probs.exp()).sum(dim=-1))


def _seconds(work: Callable[[], Any]) -> float:
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)
