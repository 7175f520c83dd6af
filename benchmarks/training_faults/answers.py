"""Each action of the guards in a real run: did it do what it says?"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from safetensors.torch import load_file

from benchmarks.training_faults.injection import Inject, Now, optimizer_of, replaced
from benchmarks.training_faults.kept_outcomes import kept_or_made
from benchmarks.training_faults.reward_faults import reward_nan
from benchmarks.training_faults.runs import LabRun, run_with, small_settings
from benchmarks.training_faults.sampling_faults import sampling_changed
from benchmarks.training_faults.sync_faults import first_sync_skipped
from benchmarks.training_faults.update_faults import applied_rate
from benchmarks.training_faults.watching import Starts, Updates, digest_of, weights_digest
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, TrainingStopped
from mismatch_probe.guards.rules import DEFAULT_GUARDS, parse_guards
from mismatch_probe.guards.rules.base import GuardSettings
from mismatch_probe.records.sequences import ScoredSequence, TokenSequence
from mismatch_probe.train.checkpoints import Checkpoints
from mismatch_probe.train.objectives.catalogue import CORRECTIONS
from mismatch_probe.train.parts import TrainingParts

STEP: Final = 3
"""At which the guard asks."""
STEPS: Final = 5
RATE: Final = 1e-4


@dataclass(frozen=True)
class Proof:
    action: str
    checks: dict[str, bool]
    seen: str

    @property
    def holds(self) -> bool:
        return all(self.checks.values())


def skip_update(scratch: Path, **changes: Any) -> Proof:
    seen = Starts()
    settings = small_settings(Dtype.FP16, seed=0, steps=STEPS, **changes)
    run_with(scratch, settings, seen.record, guards=asking("skip_update"))
    return Proof(
        "skip_update",
        {
            "weights after the step are those before it, bit for bit": seen.weights[STEP + 1] == seen.weights[STEP],
            "so are AdamW's moments": seen.moments[STEP + 1] == seen.moments[STEP],
            "the step before and the step after changed them": seen.weights[STEP] != seen.weights[STEP - 1]
            and seen.weights[STEP + 2] != seen.weights[STEP + 1],
        },
        f"SHA-256 of the weights {seen.weights[STEP][:12]} before and {seen.weights[STEP + 1][:12]} after",
    )


def lower_learning_rate(scratch: Path, **changes: Any) -> Proof:
    rates: dict[int, float] = {}

    def record(parts: TrainingParts, now: Now) -> None:
        def make(step: Callable[[float], None]) -> Callable[[float], None]:
            def recorded(rate: float) -> None:
                rates[now.step] = rate
                step(rate)

            return recorded

        replaced(optimizer_of(parts), "step", make)

    settings = small_settings(Dtype.FP16, seed=0, steps=STEPS, **changes)
    run = run_with(scratch, settings, record, guards=asking("lower_learning_rate(0.5)"))
    logged = [metrics["optim/learning_rate"] for metrics in run.metrics.values()]
    return Proof(
        "lower_learning_rate(0.5)",
        {
            "the step that asked is taken at half the rate": rates[STEP - 1] == RATE and rates[STEP] == RATE / 2,
            "so are the later ones": {rates[step] for step in range(STEP, STEPS + 1)} == {RATE / 2},
            "the log says so from the next step on": logged[STEP:] == [RATE / 2] * (STEPS - STEP),
        },
        f"rates of the steps {', '.join(f'{rate:g}' for rate in rates.values())}",
    )


def switch_correction(scratch: Path, **changes: Any) -> Proof:
    updates = Updates()
    settings = small_settings(Dtype.FP16, seed=0, steps=STEPS, objective={"name": "grpo"}, **changes)
    inject = _both(partial(sampling_changed, temperature=1.7), updates.record)
    run_with(scratch, settings, inject, Now(STEP), guards=asking("switch_correction(seq-mis)"))
    first, again = updates.of(STEP)
    later = [update for step in range(STEP + 1, STEPS + 1) for update in updates.of(step)]
    return Proof(
        "switch_correction(seq-mis)",
        {
            "the update that asked is computed again with it": first.plan.objective.correction == CORRECTIONS["none"]
            and again.plan.objective.correction == CORRECTIONS["seq-mis"],
            "later updates use it": all(step.plan.objective.correction == CORRECTIONS["seq-mis"] for step in later),
            "it rejects responses sampled at a temperature of 1.7": again.plan.corrected.num_rejected > 0,
        },
        f"responses rejected {first.plan.corrected.num_rejected}, then {again.plan.corrected.num_rejected} of "
        f"{again.plan.corrected.num_units} in the same step",
    )


def tighten_sequences(scratch: Path, **changes: Any) -> Proof:
    updates = Updates()
    settings = small_settings(Dtype.FP16, seed=0, steps=STEPS, **changes)
    run = run_with(scratch, settings, updates.record, guards=asking("tighten_sequences(0.5)"))
    first, again = (int(update.plan.batch.included_N.sum()) for update in updates.of(STEP))
    bound = Checkpoints(run.directory.checkpoints_path, keep=2).adjustments(STEPS).sequence_bound
    return Proof(
        "tighten_sequences(0.5)",
        {
            "the update that asked is computed again without the responses farthest off": 0 < again < first,
            "the bound stays": bound is not None,
        },
        f"{first} responses in the loss, then {again} in the same step, those with abs(S) within {bound:.2g} nats",
    )


def resync(scratch: Path, **changes: Any) -> Proof:
    answers: dict[int, list[str]] = {}

    def record(parts: TrainingParts, now: Now) -> None:
        def make(replay: Callable[..., list[ScoredSequence]]) -> Callable[..., list[ScoredSequence]]:
            def recorded(sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
                scored = replay(sequences)
                answers.setdefault(now.step, []).append(digest_of(scores.logprobs for scores in scored))
                return scored

            return recorded

        replaced(parts.engine, "replay", make)

    settings = small_settings(Dtype.FP16, seed=0, steps=STEPS, **changes)
    inject = _both(first_sync_skipped, record)
    run = run_with(scratch, settings, inject, Now(STEP), guards=asking(["skip_update", "resync"]))
    before, (stale, fresh), after = answers[STEP - 1][-1], answers[STEP], answers[STEP + 1][0]
    metrics = run.metrics
    return Proof(
        "resync",
        {
            "a skipped sync left the engine with its old answers": stale == before,
            "the resync changed them within the step": fresh != stale,
            "to what the next sync of the same weights gives, bit for bit": fresh == after,
        },
        f"k3 of the probe {metrics[STEP]['sync/probe_k3']:.1e} nats when the sync was skipped, "
        f"{metrics[STEP + 1]['sync/probe_k3']:.1e} at the next",
    )


def raise_precision(scratch: Path, **changes: Any) -> Proof:
    steps = 3 * STEPS // 2
    guards = asking("raise_precision(infer)", "log", "log", "raise_precision(train)")
    settings = small_settings(Dtype.BF16, seed=0, steps=steps, checkpoint={"keep": 20}, **changes)
    seen = Starts()
    run = run_with(scratch, settings, seen.record, guards=guards)
    metrics, second = run.metrics, STEP + 3
    spans = {"bf16/bf16": (1, STEP), "bf16/fp32": (STEP + 1, second), "fp32/fp32": (second + 1, steps)}
    k3 = {
        name: median(metrics[step]["mismatch/kl_k3"] for step in range(start, end + 1))
        for name, (start, end) in spans.items()
    }
    effective = run.directory.read_training_manifest().effective
    kept = {step: _digest_of_checkpoint(run, step) for step in (STEP, second)}
    return Proof(
        "raise_precision(infer), raise_precision(train)",
        {
            "the run was assembled three times and ended": len(run.assembled) == 3 and len(metrics) == steps,
            "each time it went on with the same weights, bit for bit": all(
                seen.weights[step + 1] == digest for step, digest in kept.items()
            ),
            "the policy computes in FP32 at the end": effective["policy"]["compute_dtype"] == "fp32",
            "both sides together agree as FP32 does": k3["fp32/fp32"] < 1e-3 * k3["bf16/bf16"],
        },
        ", ".join(f"k3 {value:.1e} in {name}" for name, value in k3.items()) + " (training/inference)",
    )


def rollback(scratch: Path, **changes: Any) -> Proof:
    """The default guards and one update at a hundred times the rate, unseen, whose weights are in a checkpoint."""
    bad = STEP + 1
    settings = small_settings(Dtype.FP16, seed=0, steps=2 * STEPS, checkpoint={"every": 2, "keep": 20}, **changes)
    seen = Starts()
    run = run_with(scratch, settings, _both(seen.record, partial(applied_rate, factor=100.0)), Now(bad, bad + 1))
    metrics, decided = run.metrics, run.decisions[bad + 1]
    kept = Checkpoints(run.directory.checkpoints_path, keep=20).steps()
    good = 0
    fired = [event.guard for event in decided.events]
    return Proof(
        "rollback",
        {
            "a guard asked for it one step after the update": "rollback" in [str(action) for action in decided.actions],
            "weights are those of the last good checkpoint, bit for bit": seen.weights[bad + 2]
            == seen.weights[good + 1]
            == _digest_of_checkpoint(run, good),
            "so are AdamW's moments": seen.moments[bad + 2] == seen.moments[good + 1],
            "checkpoints after that, the bad one among them, are gone": good in kept and not {2, bad} & set(kept),
            "training goes on": len(metrics) == 2 * STEPS and seen.weights[bad + 3] != seen.weights[bad + 2],
        },
        f"{', '.join(fired)}; policy moved by {metrics[bad + 1]['update/policy_shift_k3']:.2g} nats; reward "
        f"{metrics[bad]['reward/mean']:.2f} before, {metrics[bad + 1]['reward/mean']:.2f} with the bad update, "
        f"{metrics[bad + 2]['reward/mean']:.2f} after",
    )


def stop(scratch: Path, **changes: Any) -> Proof:
    """The default guards and a reward that is NaN; then the same run continued with a sound reward."""
    [guard] = [guard for guard in DEFAULT_GUARDS if guard.name == "reward-nonfinite"]
    last = STEP + len(guard.actions) - 1
    settings = small_settings(Dtype.FP16, seed=0, steps=last, **changes)
    stopped = run_with(scratch, settings, reward_nan, Now(STEP))
    steps = len(stopped.metrics)
    newest = Checkpoints(stopped.directory.checkpoints_path, keep=2).steps()[-1]
    resumed = run_with(scratch, settings, now=Now(last + 1, step=newest + 1), resume=True)
    return Proof(
        "stop",
        {
            "the run ended with exit code 1": stopped.stopped is not None
            and TrainingStopped.exit_code == ExitCode.GATE_FAILED,
            "the diagnosis names the rewards": "NaN" in (stopped.stopped or ""),
            "a resumed run ends": resumed.stopped is None and len(resumed.metrics) == last,
        },
        f"stopped at step {steps}: {stopped.stopped} Resumed after step {newest}",
    )


Prove = Callable[..., Proof]
"""Called with a folder for the run, and with what its settings have otherwise."""

PROOFS: Final[tuple[Prove, ...]] = (
    skip_update,
    lower_learning_rate,
    switch_correction,
    tighten_sequences,
    resync,
    raise_precision,
    rollback,
    stop,
)


def proof(make: Prove, scratch: Path, until: float = float("inf")) -> Proof:
    """Run it, or read what came of it before. Raises as `kept_or_made`."""
    name = f"answer-{make.__name__}"
    path = scratch / "outcomes" / f"{name}.json"
    return Proof(**kept_or_made(path, lambda: asdict(make(scratch / "runs" / name)), until))


def asking(*firings: str | list[str]) -> tuple[GuardSettings, ...]:
    """One guard that fires in every step from `STEP` on and asks for these in turn, at last for nothing."""
    guard = {
        "name": "asked",
        "rule": "limit",
        "metric": "reward/mean",
        "above": -1.0,
        "warmup": STEP - 1,
        "actions": [*firings, "log"],
    }
    return parse_guards({"defaults": False, "guard": [guard]}, "the proof")


def _both(*injections: Inject) -> Inject:
    def inject(parts: TrainingParts, now: Now) -> None:
        for injection in injections:
            injection(parts, now)

    return inject


def _digest_of_checkpoint(run: LabRun, step: int) -> str:
    folder = Checkpoints(run.directory.checkpoints_path, keep=1).model_path(step)
    return weights_digest(load_file(folder / "model.safetensors"))
