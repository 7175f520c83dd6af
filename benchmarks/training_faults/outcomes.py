"""A fault's run judged: when guards fired, what they did, which cause they named, and what is left of the policy."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.training_faults.fault import LAST_ONSET, Draw, Fault
from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.kept_policies import Measured, measured_policy, same_weights
from benchmarks.training_faults.runs import (
    KEEP,
    LabRun,
    branched,
    checkpoint_path,
    checkpoint_steps,
    run_with,
    small_settings,
)
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.diagnose import diagnose
from mismatch_probe.guards.diagnosis import GuardEvent

LATER: Final = 20
"""Steps after its onset at which a fault is judged."""
SOON: Final = 2
"""Steps, the first faulty one included, within which most faults are seen."""
_ERRORS: Final = 2.0


@dataclass(frozen=True)
class Firing:
    step: int
    guard: str
    value: str
    actions: list[str]


@dataclass(frozen=True)
class FaultOutcome:
    """`drawn` says when the fault was there, `goes_on` that the run must not end for it. `fired` is the step of the
    first right guard, `cause` what the diagnosis says then. ended: the sentence that the run was ended with. kept: the
    step of the checkpoint that is left; rewards are of that policy and of the clean twin's at that step, or the newest
    before it, on all problems and with the right reward function.
    """

    fault: str
    strength: str
    dtype: Dtype
    heals: bool
    goes_on: bool
    drawn: Draw
    fired: int | None
    guard: str | None
    actions: list[str]
    cause: str | None
    right_cause: bool
    firings: list[Firing]
    early: list[Firing]
    ended: str | None
    steps: int
    kept: int
    reward: float
    reward_error: float
    twin_reward: float
    twin_error: float

    @property
    def is_seen(self) -> bool:
        """By a guard that is right, or by an error that ends the run, and nothing fired before."""
        return (self.fired is not None or self.ended is not None) and not self.early

    @property
    def is_named(self) -> bool:
        """By the diagnosis when the guard fired, or by the error's sentence."""
        return self.right_cause or (self.fired is None and self.ended is not None)

    @property
    def in_time(self) -> bool:
        first = self.steps if self.fired is None and self.ended is not None else self.fired
        return self.is_seen and first is not None and first < self.drawn.onset + SOON

    @property
    def has_checkpoint_with_it(self) -> bool:
        """Whether a checkpoint's turn came at a faulty step before a right guard fired."""
        end = self.steps + 1 if self.fired is None else self.fired
        last = end if self.drawn.lasts is None else min(end, self.drawn.onset + self.drawn.lasts)
        return any(step % self.drawn.every == 0 for step in range(self.drawn.onset, last))

    @property
    def survived(self) -> bool:
        """Whether the policy that is left is as good as the clean twin's, within two standard errors, and a run that
        must go on was not ended.
        """
        if self.goes_on and self.ended is not None:
            return False
        return self.reward >= self.twin_reward - _ERRORS * math.hypot(self.reward_error, self.twin_error)


def fault_outcome(
    fault: Fault, dtype: Dtype, drawn: Draw, scratch: Path, later: int = LATER, until: float = float("inf")
) -> FaultOutcome:
    """Run the fault as it was drawn, or read what came of it before; it is judged `later` steps after its onset. Raises
    as `kept_or_made`.
    """
    path = scratch / "outcomes" / f"{_run_name(fault, dtype, drawn)}.json"
    content = kept_or_made(path, lambda: asdict(_run(fault, dtype, drawn, scratch, later)), until)
    firings = {name: [Firing(**firing) for firing in content[name]] for name in ("firings", "early")}
    return FaultOutcome(**{**content, **firings, "drawn": Draw(**content["drawn"])})


def _run_name(fault: Fault, dtype: Dtype, drawn: Draw) -> str:
    return f"{dtype}-{fault.slug}-{drawn.number}"


def _run(fault: Fault, dtype: Dtype, drawn: Draw, scratch: Path, later: int) -> FaultOutcome:
    twin = clean_twin(fault, dtype, scratch, later)
    path = scratch / "runs" / _run_name(fault, dtype, drawn)
    now, checkpoint = drawn.now, {"every": drawn.every, "keep": KEEP}
    settings = small_settings(
        dtype, seed=0, steps=drawn.onset + later + fault.longer, checkpoint=checkpoint, **fault.settings
    )
    if not fault.from_start:
        now.step = 1 + branched(twin, path, drawn.onset, drawn.every)
    run = run_with(path, settings, fault.inject, now, resume=not fault.from_start)
    if run.failed is not None and fault.guards:
        raise RuntimeError(f"{fault.name} {fault.strength} is for a guard to see, and the run failed: {run.failed}")
    return _judged(fault, dtype, drawn, run, twin, scratch)


def clean_twin(fault: Fault, dtype: Dtype, scratch: Path, later: int = LATER) -> Path:
    """The run of these settings without the fault, with a checkpoint of every step, made once: its directory. The
    fault's own run begins as its copy.
    """
    steps = LAST_ONSET + later + fault.longer
    own: dict[str, Any] = {} if fault.from_start else dict(fault.settings)
    name = f"{dtype}-twin" + (f"-{fault.slug}" if own else "")
    path = scratch / "runs" / name
    settings = small_settings(dtype, seed=0, steps=steps, checkpoint={"every": 1, "keep": steps + 1}, **own)
    kept_or_made(scratch / "outcomes" / f"{name}.json", lambda: {"steps": len(run_with(path, settings).metrics)})
    return path


def _judged(fault: Fault, dtype: Dtype, drawn: Draw, run: LabRun, twin: Path, scratch: Path) -> FaultOutcome:
    events, metrics = all_events(run), run.metrics
    right = next((event for event in events if event.guard in fault.guards and event.step >= drawn.onset), None)
    cause = None if right is None else _cause_at(right.step, metrics, events)
    kept = checkpoint_steps(run.directory.path)[-1]
    mine = checkpoint_path(run.directory.path, kept)
    its = checkpoint_path(twin, max(step for step in checkpoint_steps(twin) if step <= kept))
    rewards = measured_policy(its, dtype, scratch)
    policy_left: Measured = rewards if same_weights(mine, its) else measured_policy(mine, dtype, scratch)
    return FaultOutcome(
        fault=fault.name,
        strength=fault.strength,
        dtype=dtype,
        heals=fault.heals,
        goes_on=fault.goes_on,
        drawn=drawn,
        fired=None if right is None else right.step,
        guard=None if right is None else right.guard,
        actions=[] if right is None else [str(action) for action in right.actions],
        cause=cause,
        right_cause=cause in {each_cause.value for each_cause in fault.causes},
        firings=as_firings(events),
        early=as_firings([event for event in events if event.step < drawn.onset]),
        ended=run.stopped or run.failed,
        steps=max(metrics, default=0),
        kept=kept,
        reward=policy_left.reward,
        reward_error=policy_left.error,
        twin_reward=rewards.reward,
        twin_error=rewards.error,
    )


def _cause_at(step: int, metrics: dict[int, dict[str, float]], events: Sequence[GuardEvent]) -> str:
    """What the diagnosis says at the end of a step."""
    history = {past: values for past, values in metrics.items() if step - 16 < past <= step}
    return diagnose(history, [event for event in events if event.step <= step]).cause.value


def all_events(run: LabRun) -> list[GuardEvent]:
    return [GuardEvent.from_json(event) for event in run.directory.read_events()]


def as_firings(events: Sequence[GuardEvent]) -> list[Firing]:
    return [
        Firing(event.step, event.guard, f"{event.value:.3g}", [str(action) for action in event.actions])
        for event in events
    ]
