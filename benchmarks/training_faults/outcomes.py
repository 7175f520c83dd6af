"""A fault's run judged: when the guards fired, what they did, which cause they would name."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.training_faults.faults import Fault
from benchmarks.training_faults.injection import Now
from benchmarks.training_faults.runs import LabRun, run_with, small_settings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.decision import GuardEvent
from mismatch_probe.guards.diagnose import diagnose

ONSET: Final = 6
STEPS: Final = 10
CLEAN_STEPS: Final = 30
SOON: Final = 2
"""Steps, the first faulty one included, within which a fault has to be seen."""


@dataclass(frozen=True)
class Firing:
    step: int
    guard: str
    value: str
    actions: list[str]


@dataclass(frozen=True)
class FaultOutcome:
    """`fired` is the step of the first right guard; `level` and `moved` are its metric before and at that step."""

    fault: str
    strength: str
    usual: bool
    dtype: Dtype
    onset: int
    fired: int | None
    guard: str | None
    actions: list[str]
    cause: str | None
    right_cause: bool
    firings: list[Firing]
    early: list[Firing]
    stopped: str | None
    steps: int

    @property
    def in_time(self) -> bool:
        return self.fired is not None and self.fired < self.onset + SOON and not self.early


@dataclass(frozen=True)
class CleanOutcome:
    dtype: Dtype
    seed: int
    steps: int
    overflows: int
    firings: list[Firing]
    first_reward: float
    last_reward: float


def fault_outcome(fault: Fault, dtype: Dtype, scratch: Path, steps: int = STEPS) -> FaultOutcome:
    """Run the fault, or read what came of it before; fewer `steps` show less of what follows."""
    name = f"{dtype}-{fault.slug}"
    kept = scratch / "outcomes" / f"{name}.json"
    if kept.exists():
        return _read_fault(kept)
    now = Now(ONSET, None if fault.lasts is None else ONSET + fault.lasts)
    run = run_with(scratch / "runs" / name, small_settings(dtype, seed=0, steps=steps), fault.inject, now)
    found = _judged(fault, dtype, run)
    _write(kept, asdict(found))
    return found


def clean_outcome(dtype: Dtype, seed: int, scratch: Path, growth_interval: int | None = None) -> CleanOutcome:
    """Run without a fault, or read what came of it before; `growth_interval` of the loss scale, if not the default."""
    name = f"{dtype}-clean-{seed}" + ("" if growth_interval is None else f"-growth-{growth_interval}")
    kept = scratch / "outcomes" / f"{name}.json"
    if kept.exists():
        content = json.loads(kept.read_text(encoding="utf-8"))
        return CleanOutcome(**{**content, "firings": [Firing(**one) for one in content["firings"]]})
    scale = {} if growth_interval is None else {"loss_scale": {"growth_interval": growth_interval}}
    settings = small_settings(dtype, seed=seed, steps=CLEAN_STEPS, **scale)
    run = run_with(scratch / "runs" / name, settings)
    steps = list(run.metrics.values())
    found = CleanOutcome(
        dtype=dtype,
        seed=seed,
        steps=len(steps),
        overflows=sum(int(step["optim/overflow"]) for step in steps),
        firings=_firings(_events(run)),
        first_reward=sum(step["reward/mean"] for step in steps[:5]) / 5,
        last_reward=sum(step["reward/mean"] for step in steps[-5:]) / 5,
    )
    _write(kept, asdict(found))
    return found


def _judged(fault: Fault, dtype: Dtype, run: LabRun) -> FaultOutcome:
    events, metrics = _events(run), run.metrics
    right = next((event for event in events if event.guard in fault.guards and event.step >= ONSET), None)
    cause = None
    if right is not None:
        until = right.step
        cause = diagnose(
            {step: values for step, values in metrics.items() if step <= until},
            [event for event in events if event.step <= until],
        ).cause
    return FaultOutcome(
        fault=fault.name,
        strength=fault.strength,
        usual=fault.usual,
        dtype=dtype,
        onset=ONSET,
        fired=None if right is None else right.step,
        guard=None if right is None else right.guard,
        actions=[] if right is None else [str(action) for action in right.actions],
        cause=None if cause is None else cause.value,
        right_cause=cause in fault.causes,
        firings=_firings(events),
        early=_firings([event for event in events if event.step < ONSET]),
        stopped=run.stopped,
        steps=len(metrics),
    )


def _events(run: LabRun) -> list[GuardEvent]:
    return [event for decision in run.seen.decisions.values() for event in decision.events]


def _firings(events: Sequence[GuardEvent]) -> list[Firing]:
    return [
        Firing(event.step, event.guard, f"{event.value:.3g}", [str(action) for action in event.actions])
        for event in events
    ]


def _read_fault(path: Path) -> FaultOutcome:
    content = json.loads(path.read_text(encoding="utf-8"))
    firings = {name: [Firing(**one) for one in content[name]] for name in ("firings", "early")}
    return FaultOutcome(**{**content, **firings})


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
