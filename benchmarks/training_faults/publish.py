"""The lab's report: what a person reads, and every outcome as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.training_faults.answers import Proof
from benchmarks.training_faults.clean_runs import CLEAN_STEPS, CleanOutcome
from benchmarks.training_faults.cost import Cost
from benchmarks.training_faults.fault import FIRST_ONSET, LAST_ONSET, LONGEST_HEALING, LONGEST_INTERVAL
from benchmarks.training_faults.outcomes import LATER, SOON, FaultOutcome
from benchmarks.training_faults.runs import SMALL

EDGE = (
    f"{CLEAN_STEPS} steps; the loss scale doubles after every second clean step instead of the 400th, so that it "
    "overflows again and again. Two overflows in a row warn."
)


@dataclass
class Results:
    faults: list[FaultOutcome] = field(default_factory=list)
    clean: list[CleanOutcome] = field(default_factory=list)
    at_the_edge: list[CleanOutcome] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)


def publish(results: Results, folder: Path, command: str) -> None:
    """Write `training-guards.md` and `training-guards.json`, of what was run."""
    clean = f"{CLEAN_STEPS} steps each, default settings but for the shape."
    parts = [_summary(results, command)]
    parts += [_faults(results.faults)] if results.faults else []
    parts += [_clean("Clean runs", clean, results.clean)] if results.clean else []
    parts += [_clean("FP16 at the edge", EDGE, results.at_the_edge)] if results.at_the_edge else []
    parts += [_proofs(results.proofs)] if results.proofs else []
    parts += [_costs(results.costs)] if results.costs else []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training-guards.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    record = {"command": command, **asdict(results)}
    (folder / "training-guards.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _summary(results: Results, command: str) -> str:
    faults = results.faults
    rollout = SMALL["rollout"]
    poisoned = [fault for fault in faults if fault.has_checkpoint_with_it]
    healing = [fault for fault in faults if fault.heals]
    unseen = ", ".join(_called(fault) for fault in faults if not fault.is_seen) or "none"
    lost = ", ".join(_called(fault) for fault in faults if not fault.survived) or "none"
    return "\n".join(
        (
            "# Guards against real faults",
            "",
            f"Real training runs on the shipped checkpoint (vLLM in process, {rollout['prompts']} prompts x "
            f"{rollout['samples']} samples, up to {rollout['max_new_tokens']} tokens), each with one fault injected "
            f"and judged {LATER} steps after its onset (a lost entropy a few later), under the default guards. "
            "Drawn at random, the same in every "
            f"call: the onset, step {FIRST_ONSET} to {LAST_ONSET}; a checkpoint every 1 to {LONGEST_INTERVAL} steps; "
            f"and, of a fault that heals, that it lasts for 1 to {LONGEST_HEALING} steps.",
            "",
            f"- Seen, and nothing fired before: **{sum(fault.is_seen for fault in faults)} of {len(faults)}**, "
            f"{sum(fault.in_time for fault in faults)} of them within {SOON} steps; cause named right at that step: "
            f"{sum(fault.is_named for fault in faults)}. Not seen: {unseen}. What hidden settings take to be seen: "
            "`docs/guards.md`.",
            f"- **Survived: {sum(fault.survived for fault in faults)} of {len(faults)}**: the policy that is left "
            f"earns as much as the clean twin's of that step, within two standard errors, and a run whose fault heals, "
            f"or whose problems get harder, goes on. Not survived: {lost}.",
            f"- A checkpoint was taken at a faulty step before a guard fired in **{len(poisoned)}** runs, "
            f"{sum(outcome.survived for outcome in poisoned)} of which survived; of {len(healing)} runs whose fault "
            f"heals {sum(outcome.ended is not None for outcome in healing)} were ended.",
            *_of_the_rest(results),
            "",
            f"Made by `{command}`.",
            *(("", f"Not run for want of time: {', '.join(results.not_run)}.") if results.not_run else ()),
        )
    )


def _of_the_rest(results: Results) -> Iterator[str]:
    clean, proofs = results.clean, results.proofs
    if clean:
        yield (
            f"- Clean runs: **{sum(outcome.stopped is not None for outcome in clean)} stopped**, "
            f"{sum(len(outcome.firings) for outcome in clean)} firings, in {len(clean)} runs, "
            f"{sum(outcome.steps for outcome in clean)} steps."
        )
    if proofs:
        yield f"- Actions proven in real runs: **{sum(proof.holds for proof in proofs)} of {len(proofs)}**."
    if results.costs:
        cost = ", ".join(f"{cost.share:.2%} ({cost.dtype})" for cost in results.costs)
        yield f"- Metrics and guards cost **{cost}** of a step."


def _called(fault: FaultOutcome) -> str:
    return f"{fault.fault} {fault.strength} ({fault.dtype}, draw {fault.drawn.number})"


def _faults(faults: Sequence[FaultOutcome]) -> str:
    lines = [
        "## Faults",
        "",
        "`onset` is the first faulty step, `lasts` how many there are, `every` the steps between checkpoints. `kept` "
        "is the step of the newest checkpoint at the end. Its reward is measured on all 64 problems, 256 responses, "
        "with the right reward function, beside the clean twin's of the same step.",
        "",
        "| fault | strength | dtype | onset | lasts | every | fired | guard | answer | cause | then | kept | "
        "reward, twin's | survived |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for fault in faults:
        drawn = fault.drawn
        fired = "not" if fault.fired is None else str(fault.fired)
        cause = "" if fault.cause is None else fault.cause + ("" if fault.right_cause else " (wrong)")
        then = "went on" if fault.ended is None else f"stopped at {fault.steps}"
        if fault.ended is not None and fault.fired is None:
            then = f"ended with an error after step {fault.steps}"
        lines.append(
            f"| {fault.fault} | {fault.strength} | {fault.dtype} | {drawn.onset} | {drawn.lasts or ''} | "
            f"{drawn.every} | {fired} | {fault.guard or ''} | "
            f"{' + '.join(fault.actions)} | {cause} | {then} | {fault.kept} | {fault.reward:.2f}, "
            f"{fault.twin_reward:.2f} | {'yes' if fault.survived else 'no'} |"
        )
    return "\n".join(lines)


def _clean(title: str, about: str, clean: Sequence[CleanOutcome]) -> str:
    lines = [
        f"## {title}",
        "",
        about,
        "",
        "| dtype | shape | overflows | firings | stopped | reward, first and last 5 steps |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in clean:
        firings = ", ".join(f"{firing.guard} at {firing.step}" for firing in outcome.firings) or "none"
        reward = f"{outcome.first_reward:.2f}, {outcome.last_reward:.2f}"
        stopped = "no" if outcome.stopped is None else f"at {outcome.steps}"
        lines.append(f"| {outcome.dtype} | {outcome.shape} | {outcome.overflows} | {firings} | {stopped} | {reward} |")
    return "\n".join(lines)


def _proofs(proofs: Sequence[Proof]) -> str:
    lines = ["## Actions", "", "| action | what was checked | seen |", "|---|---|---|"]
    for proof in proofs:
        checks = "; ".join(f"{what}{'' if held else ' (**no**)'}" for what, held in proof.checks.items())
        lines.append(f"| `{proof.action}` | {checks} | {proof.seen} |")
    return "\n".join(lines)


def _costs(costs: Sequence[Cost]) -> str:
    lines = ["## Cost", "", "Milliseconds of a step of 32 prompts x 8 samples, medians.", ""]
    names = list(dict.fromkeys(name for cost in costs for name in cost.parts))
    lines += [
        f"| dtype | {' | '.join(names)} | step | share |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for cost in costs:
        cells = " | ".join(f"{1e3 * cost.parts[name]:.2f}" for name in names)
        lines.append(f"| {cost.dtype} | {cells} | {1e3 * cost.step_seconds:.0f} | {cost.share:.2%} |")
    return "\n".join(lines)
