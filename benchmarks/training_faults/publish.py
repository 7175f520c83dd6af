"""The lab's report: what a person reads, and every outcome as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.training_faults.answers import Proof
from benchmarks.training_faults.cost import Cost
from benchmarks.training_faults.outcomes import CLEAN_STEPS, ONSET, SOON, CleanOutcome, FaultOutcome
from benchmarks.training_faults.runs import SMALL

EDGE = (
    f"{CLEAN_STEPS} steps each; the loss scale doubles after every second clean step instead of the 400th, so that it "
    "overflows again and again. Two overflows in a row warn."
)


@dataclass
class Results:
    faults: list[FaultOutcome] = field(default_factory=list)
    clean: list[CleanOutcome] = field(default_factory=list)
    at_the_edge: list[CleanOutcome] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


def publish(results: Results, folder: Path, command: str) -> None:
    """Write `training-guards.md` and `training-guards.json`."""
    parts = (
        _summary(results, command),
        _faults(results.faults),
        _clean("Clean runs", f"{CLEAN_STEPS} steps each, default settings.", results.clean),
        _clean("FP16 at the edge", EDGE, results.at_the_edge),
        _proofs(results.proofs),
        _costs(results.costs),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training-guards.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    record = {"command": command, **asdict(results)}
    (folder / "training-guards.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _summary(results: Results, command: str) -> str:
    usual = [fault for fault in results.faults if fault.usual]
    caught = sum(one.in_time for one in usual)
    named = sum(one.right_cause for one in usual)
    firings = sum(len(one.firings) for one in results.clean)
    steps = sum(one.steps for one in results.clean)
    at_the_edge = sum(len(one.firings) for one in results.at_the_edge)
    overflows = sum(one.overflows for one in results.at_the_edge)
    rollout = SMALL["rollout"]
    cost = ", ".join(f"{cost.share:.2%} ({cost.dtype})" for cost in results.costs)
    return "\n".join(
        (
            "# Guards against real faults",
            "",
            f"Real training runs on the shipped checkpoint (vLLM in process, {rollout['prompts']} prompts x "
            f"{rollout['samples']} samples, up to {rollout['max_new_tokens']} tokens), each with one fault injected "
            f"from step {ONSET} on, under the default guards.",
            "",
            f"- Caught within {SOON} steps, nothing fired before: **{caught} of {len(usual)}** at usual strengths; "
            f"cause named right at that step: {named} of {len(usual)}.",
            f"- Clean runs: **{firings} firings** in {len(results.clean)} runs, {steps} steps.",
            f"- FP16 runs whose loss scale is kept at the edge of overflow: {at_the_edge} firings, all told below, in "
            f"{len(results.at_the_edge)} runs with {overflows} overflows.",
            f"- Actions proven in real runs: **{sum(proof.holds for proof in results.proofs)} of "
            f"{len(results.proofs)}**.",
            f"- Metrics and guards cost **{cost}** of a step.",
            "",
            f"Made by `{command}`.",
        )
    )


def _faults(faults: Sequence[FaultOutcome]) -> str:
    lines = [
        "## Faults",
        "",
        f"Step {ONSET} is the first faulty one. Strengths in brackets are weaker than what the defaults are to see.",
        "",
        "| fault | strength | dtype | fired at | guard | answer | cause named | then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in faults:
        strength = fault.strength if fault.usual else f"({fault.strength})"
        fired = "not" if fault.fired is None else str(fault.fired)
        cause = "" if fault.cause is None else fault.cause + ("" if fault.right_cause else " (wrong)")
        then = f"stopped at {fault.steps}" if fault.stopped else "went on"
        answer = " + ".join(fault.actions)
        lines.append(
            f"| {fault.fault} | {strength} | {fault.dtype} | {fired} | {fault.guard or ''} | {answer} | {cause} | "
            f"{then} |"
        )
    return "\n".join(lines)


def _clean(title: str, about: str, clean: Sequence[CleanOutcome]) -> str:
    lines = [
        f"## {title}",
        "",
        about,
        "",
        "| dtype | seed | overflows | firings | reward, first and last 5 steps |",
        "|---|---|---|---|---|",
    ]
    for one in clean:
        firings = ", ".join(f"{firing.guard} at {firing.step}" for firing in one.firings) or "none"
        reward = f"{one.first_reward:.2f}, {one.last_reward:.2f}"
        lines.append(f"| {one.dtype} | {one.seed} | {one.overflows} | {firings} | {reward} |")
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
