"""Runs of many shapes without a fault: what the guards say where there is nothing to say."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.training_faults.injection import Inject
from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.outcomes import Firing, all_events, as_firings
from benchmarks.training_faults.runs import run_with, small_settings
from benchmarks.training_faults.update_faults import restarting_rate
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype

CLEAN_STEPS: Final = 30
_UNMOVING: Final = {"optimizer": {"learning_rate": 1e-9}}


def _shape(prompts: int, samples: int, **changes: Any) -> dict[str, Any]:
    return {"rollout": {"prompts": prompts, "samples": samples}, **changes}


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "1 x 4": _shape(1, 4),
    "2 x 2": _shape(2, 2),
    "2 x 8": _shape(2, 8),
    "8 x 4": _shape(8, 4),
    "16 x 4": _shape(16, 4),
    "32 x 8": _shape(32, 8),
    "1 x 4, unmoving": _shape(1, 4, **_UNMOVING),
    "2 x 4, unmoving": _shape(2, 4, **_UNMOVING),
    "8 x 4, unmoving": _shape(8, 4, **_UNMOVING),
    "4 x 16, unmoving": _shape(4, 16, **_UNMOVING),
    "8 x 4, LoRA": _shape(8, 4, policy={"lora": {"rank": 8}}),
    "8 x 4, PPO": _shape(8, 4, objective={"name": "ppo"}),
    "8 x 4, GSPO": _shape(8, 4, objective={"name": "gspo"}),
    "4 x 8, GRPO": _shape(4, 8, objective={"name": "grpo"}),
    "8 x 4, two updates": {"rollout": {"updates": 2}},
    "8 x 4, rate begins anew": {},
}
INJECTED: Final[dict[str, Inject]] = {"8 x 4, rate begins anew": partial(restarting_rate, cycle=8)}
"""What no setting gives."""


@dataclass(frozen=True)
class CleanOutcome:
    dtype: Dtype
    shape: str
    steps: int
    overflows: int
    firings: list[Firing]
    stopped: str | None
    first_reward: float
    last_reward: float


def clean_outcome(
    dtype: Dtype, shape: str, scratch: Path, growth_interval: int | None = None, until: float = float("inf")
) -> CleanOutcome:
    """Run without a fault, or read what came of it before; `growth_interval` of the loss scale, if not the default.
    Raises as `kept_or_made`.
    """
    number = list(SHAPES).index(shape)
    name = f"{dtype}-clean-{number}" + ("" if growth_interval is None else f"-growth-{growth_interval}")
    scale = {} if growth_interval is None else {"loss_scale": {"growth_interval": growth_interval}}
    settings = small_settings(dtype, seed=number + 1, steps=CLEAN_STEPS, **SHAPES[shape], **scale)
    make = partial(_run, scratch / "runs" / name, settings, dtype, shape)
    content = kept_or_made(scratch / "outcomes" / f"{name}.json", make, until)
    return CleanOutcome(**{**content, "firings": [Firing(**firing) for firing in content["firings"]]})


def _run(path: Path, settings: TrainSettings, dtype: Dtype, shape: str) -> dict[str, Any]:
    run = run_with(path, settings, INJECTED.get(shape))
    steps = list(run.metrics.values())
    outcome = CleanOutcome(
        dtype=dtype,
        shape=shape,
        steps=len(steps),
        overflows=sum(int(step["optim/overflow"]) for step in steps),
        firings=as_firings(all_events(run)),
        stopped=run.stopped,
        first_reward=sum(step["reward/mean"] for step in steps[:5]) / 5,
        last_reward=sum(step["reward/mean"] for step in steps[-5:]) / 5,
    )
    return asdict(outcome)
