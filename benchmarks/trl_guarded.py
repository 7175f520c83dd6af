"""GRPOTrainer with guards: are our metrics TRL's, are faults caught before the update, and what does it cost?

    pip install --no-deps trl==1.16.0
    python -m benchmarks.trl_guarded --out reports/adapters.md

Each run has a process of its own: 20 steps with guards and nothing wrong, one for each fault, which begins at its step,
and for the cost the same run with and without guards, in processor seconds of whole steps. A guarded run is not told of
the fault. "Weights at that step" says whether any weight of the policy changed in the step that the guard decided on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.stats import t as student

from benchmarks.trl_trainer import SAMPLES, demo_trainer, solved
from mismatch_probe import host

STEPS = 20
FAULT_AT = 6
WARM_UP = 2
COST_STEPS = 7
COST_ROUNDS = (1, 2, 3, 4, 5)
LEVEL = 0.95
SOURCE, PROMPTS, NEW_TOKENS = "sums:terms=3", 8, 48
RATE = {"stale engine": 2e-4}
FAULTS: Final = ("none", "stale engine", "temperature 0.7", "NaN reward")
ONCE: Final = ("NaN gradient once", "infinite gradient once", "NaN loss once")
OF_BATCH: Final = ("mask of zeros", "same batch again")
DRAWN: Final = (*ONCE, *OF_BATCH, "constant rewards", "stale engine", "temperature 0.7")
"""Faults whose onset is drawn at random, once for each of `DRAWS`."""
DRAWS: Final = (1, 2)
ONSETS: Final = range(3, 15)
CONSTANT_STEPS: Final = 36
"""Of constant rewards, which are named after 16 steps."""
RUNS: Final = (
    *FAULTS,
    *(f"{kind} {number}" for number in COST_ROUNDS for kind in ("guarded", "plain")),
    *(f"{fault}, draw {draw}" for fault in DRAWN for draw in DRAWS),
)
"""Each a process of its own; `plain` ones have no guards."""

SAME: Final = {
    "sampling/sampling_logp_difference/mean": "mismatch/abs_logprob_diff",
    "sampling/sampling_logp_difference/max": "mismatch/abs_logprob_diff_max",
    "sampling/importance_sampling_ratio/mean": "mismatch/is_ratio_mean",
    "reward": "reward/mean",
    "frac_reward_zero_std": "reward/flat_groups_share",
    "completions/mean_length": "response/length_mean",
    "completions/clipped_ratio": "response/truncated_share",
    "learning_rate": "optim/learning_rate",
    "grad_norm": "optim/grad_norm",
}
"""TRL's name: ours, where both mean the same. TRL's mean ratio is bounded at 3; these runs stay below."""


def fault_of(name: str) -> tuple[str, int]:
    """The fault of a run, and the step at which it begins."""
    if name in FAULTS:
        return name, FAULT_AT
    fault, _, draw = name.partition(", draw ")
    if not draw:
        return "none", FAULT_AT
    onset = np.random.default_rng([DRAWN.index(fault), int(draw)]).integers(ONSETS.start, ONSETS.stop)
    return fault, int(onset)


def run(name: str, folder: Path) -> None:
    """One run; what it logged and decided goes to `folder/run.json`."""
    (fault, onset), guarded = fault_of(name), not name.startswith("plain")
    host.prepare_process()
    import torch
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        """Processor seconds of every step, and whether any weight changed in it."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.moved: list[bool] = []
            self.finite: list[bool] = []

        def on_step_begin(self, *_: Any, **what: Any) -> None:
            model: torch.nn.Module = what["model"]
            self.before = [parameter.detach().clone() for parameter in model.parameters()]
            self.since = time.process_time()

        def on_step_end(self, *_: Any, **what: Any) -> None:
            model: torch.nn.Module = what["model"]
            self.seconds.append(time.process_time() - self.since)
            now = list(model.parameters())
            self.finite.append(all(bool(parameter.isfinite().all()) for parameter in now))
            self.moved.append(any(not torch.equal(*pair) for pair in zip(self.before, now, strict=True)))

    steps, decisions = Steps(), list[dict[str, Any]]()

    def reward(completions: list[Any], answer: list[str], **arguments: Any) -> list[float]:
        rewards = solved(completions, answer, **arguments)
        if arguments["trainer_state"].global_step + 1 < onset or fault not in ("NaN reward", "constant rewards"):
            return rewards
        return [1.0] * len(rewards) if fault == "constant rewards" else [float("nan"), *rewards[1:]]

    trainer = demo_trainer(
        folder,
        steps=COST_STEPS if name.startswith(("guarded", "plain")) else number_of_steps(fault),
        source=SOURCE,
        prompts=PROMPTS,
        new_tokens=NEW_TOKENS,
        callbacks=[steps],
        reward=reward,
        learning_rate=RATE.get(fault, 1e-5),
        logging_steps=1,
        vllm_importance_sampling_mode="token_truncate",
    )
    plant(fault, onset, trainer)
    if guarded:
        from mismatch_probe.adapters.trl import guard

        guards = guard(trainer, probe=True)
        observe = guards.observe

        def recorded(*arguments: Any, **named: Any) -> Any:
            decision = observe(*arguments, **named)
            answer = {"step": decision.step, "guards": [event.guard for event in decision.events]}
            diagnosis = str(decision.diagnosis) if decision.stop else ""
            decisions.append({**answer, "skip": decision.skip, "stop": decision.stop, "diagnosis": diagnosis})
            return decision

        guards.observe = recorded  # type: ignore[method-assign]
    trainer.train()
    document = {
        "logs": [log for log in trainer.state.log_history if "reward" in log],
        "decisions": decisions,
        "seconds": steps.seconds,
        "moved": steps.moved,
        "finite": steps.finite,
    }
    (folder / "run.json").write_text(json.dumps(document))


def number_of_steps(fault: str) -> int:
    return CONSTANT_STEPS if fault == "constant rewards" else STEPS


def plant(fault: str, onset: int, trainer: Any) -> None:
    """The faults that are not in the reward."""
    generation = trainer.vllm_generation
    if fault in ONCE:
        plant_once(fault, onset, trainer)
    if fault in OF_BATCH:
        plant_in_batch(fault, onset, trainer)

    def from_then_on(do: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*arguments: Any, **named: Any) -> Any:
            return (instead if trainer.state.global_step + 1 >= onset else do)(*arguments, **named)

        return chosen

    if fault == "stale engine":
        generation.sync_weights = from_then_on(generation.sync_weights, lambda: None)
    if fault == "temperature 0.7":
        generate = generation.generate

        def cooler(*arguments: Any, **named: Any) -> Any:
            generation.temperature = 0.7
            return generate(*arguments, **named)

        generation.generate = from_then_on(generate, cooler)


def plant_once(fault: str, onset: int, trainer: Any) -> None:
    """One number of one gradient, or the loss, is none in one update."""
    learn, compute = trainer.training_step, trainer.compute_loss

    def is_now() -> bool:
        return bool(trainer.state.global_step + 1 == onset)

    def spoiled_gradient(model: Any, *arguments: Any, **named: Any) -> Any:
        loss = learn(model, *arguments, **named)
        if is_now():
            parameter = next(each_parameter for each_parameter in model.parameters() if each_parameter.grad is not None)
            parameter.grad.view(-1)[0] = float("inf" if fault.startswith("infinite") else "nan")
        return loss

    def spoiled_loss(*arguments: Any, **named: Any) -> Any:
        return compute(*arguments, **named) * (float("nan") if is_now() else 1.0)

    if fault.startswith("NaN loss"):
        trainer.compute_loss = spoiled_loss
    else:
        trainer.training_step = spoiled_gradient


def plant_in_batch(fault: str, onset: int, trainer: Any) -> None:
    """From the onset on no token of a batch counts, or prompts and vLLM's answers are those of the onset."""
    import torch

    score, generation = trainer._generate_and_score_completions, trainer.vllm_generation
    generate, kept = generation.generate, dict[str, Any]()

    def is_faulty() -> bool:
        return bool(trainer.state.global_step + 1 >= onset)

    def masked(*arguments: Any, **named: Any) -> Any:
        output = score(*arguments, **named)
        return {**output, "completion_mask": torch.zeros_like(output["completion_mask"])} if is_faulty() else output

    def of_the_onset(inputs: Any, *arguments: Any, **named: Any) -> Any:
        return score(kept.setdefault("inputs", inputs) if is_faulty() else inputs, *arguments, **named)

    def answered_before(*arguments: Any, **named: Any) -> Any:
        if not is_faulty() or "answers" not in kept:
            answers = generate(*arguments, **named)
            kept.update({"answers": answers} if is_faulty() else {})
            return answers
        return kept["answers"]

    if fault == "mask of zeros":
        trainer._generate_and_score_completions = masked
    else:
        trainer._generate_and_score_completions, generation.generate = of_the_onset, answered_before


def in_its_process(name: str, scratch: Path) -> dict[str, Any]:
    """What a run of `RUNS` gave, from an earlier call where it is in `scratch`."""
    folder = scratch / name.replace(",", "").replace(" ", "-")
    if not (folder / "run.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.trl_guarded", "--inside", str(folder), "--run", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return document


def equal_rows(logs: list[dict[str, float]]) -> list[str]:
    rows = []
    for theirs, ours in SAME.items():
        pairs = [(log[theirs], log[ours]) for log in logs if theirs in log and ours in log]
        largest_gap = max(abs(own - other) / max(abs(other), 1e-12) if other else abs(own) for other, own in pairs)
        last = pairs[-1]
        rows.append(f"| `{theirs}` | `{ours}` | {len(pairs)} | {last[0]:.6g} | {last[1]:.6g} | {largest_gap:.1e} |")
    return rows


def fault_row(fault: str, document: dict[str, Any]) -> str:
    fired = [decision for decision in document["decisions"] if decision["guards"]]
    if not fired:
        return f"| {fault} | - | no guard fired in {len(document['decisions'])} steps | - | - | - | - |"
    first, last = fired[0], document["decisions"][-1]
    skipped = [decision["step"] for decision in document["decisions"] if decision["skip"]]
    moved = "unchanged" if skipped and not any(document["moved"][step - 1] for step in skipped) else "changed"
    applied = sum(document["moved"][FAULT_AT - 1 :])
    stopped = f"stopped at step {last['step']}" if last["stop"] else "went on"
    by = f"{', '.join(first['guards'])}: {'update withheld' if first['skip'] else 'warned'}"
    return f"| {fault} | {first['step']} | {by} | {moved} | {applied} | {stopped} | {last['diagnosis'] or '-'} |"


def drawn_row(name: str, document: dict[str, Any]) -> str:
    fault, onset = fault_of(name)
    decisions = document["decisions"]
    early = sorted({guard for decision in decisions[: onset - 1] for guard in decision["guards"]})
    fired = [decision for decision in decisions[onset - 1 :] if decision["guards"]]
    finite = "yes" if all(document["finite"]) else "no"
    if not fired:
        return f"| {fault} | {onset} | {', '.join(early) or '-'} | - | - | {finite} | not seen |"
    first, last = fired[0], decisions[-1]
    by = f"{', '.join(first['guards'])}: {'update withheld' if first['skip'] else 'warned'}"
    ended = f"stopped at step {last['step']}" if last["stop"] else f"went on to step {last['step']}"
    later = sorted({guard for decision in fired[1:] for guard in decision["guards"]})
    ended += f"; later {', '.join(later)}" if later and fault in ONCE else ""
    return f"| {fault} | {onset} | {', '.join(early) or '-'} | {first['step']} | {by} | {finite} | {ended} |"


def drawn_lines(scratch: Path) -> list[str]:
    """The faults whose onset was drawn."""
    names = [f"{fault}, draw {draw}" for fault in DRAWN for draw in DRAWS]
    return [
        "`python -m benchmarks.trl_guarded --drawn` makes this section alone. Each fault begins at a step drawn from",
        f"{ONSETS.start} to {ONSETS.stop - 1}, and lasts unless it is called once. TRL averages a loss",
        "that is NaN away in its own log (`logging_nan_inf_filter`, on here). Finite: all weights, after every step.",
        "",
        "| fault | begins at | fired before | seen at | by | finite | the run |",
        "|---|---|---|---|---|---|---|",
        *(drawn_row(name, in_its_process(name, scratch)) for name in names),
    ]


def seconds(name: str, scratch: Path) -> float:
    """Of a step of a run, the median after the first ones."""
    return float(statistics.median(in_its_process(name, scratch)["seconds"][WARM_UP:]))


def cost_lines(scratch: Path) -> list[str]:
    """What the guards take of a step, with its interval over pairs of runs."""
    pairs = [(seconds(f"guarded {number}", scratch), seconds(f"plain {number}", scratch)) for number in COST_ROUNDS]
    ratios = np.array([guarded / plain - 1 for guarded, plain in pairs])
    half = student.ppf(0.5 + LEVEL / 2, len(ratios) - 1) * ratios.std(ddof=1) / len(ratios) ** 0.5
    guarded, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
    return [
        "Processor time of a step with guards and the probe over that of one without, medians of the",
        f"{COST_STEPS - WARM_UP} steps after the first {WARM_UP} of each of {len(pairs)} pairs of runs: "
        f"{100 * ratios.mean():+.1f} %",
        f"[{100 * (ratios.mean() - half):+.1f}, {100 * (ratios.mean() + half):+.1f}] (mean and {LEVEL:.0%} interval of "
        "Student's t over the pairs,",
        f"which gave {', '.join(f'{100 * ratio:+.1f}' for ratio in ratios)}; {guarded:.2f} s against {plain:.2f} s at "
        "the median).",
        "The steps are those of a very small model.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", type=Path)
    parser.add_argument("--run", choices=RUNS)
    parser.add_argument("--scratch", type=Path, help="a folder whose finished runs are not made again")
    parser.add_argument("--drawn", action="store_true", help="only the faults that begin at random")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.inside is not None:
        run(options.run, options.inside)
        return
    if find_spec("trl") is None:
        sys.exit("TRL is not installed; run pip install --no-deps trl==1.16.0")
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.scratch or Path(folder)
        if options.run is not None:
            in_its_process(options.run, scratch)
            return
        text = "\n".join(drawn_lines(scratch)) if options.drawn else report(scratch)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def report(scratch: Path) -> str:
    documents = {fault: in_its_process(fault, scratch) for fault in FAULTS}
    return "\n".join(
        [
            "# Guards in TRL's own loop",
            "",
            "`python -m benchmarks.trl_guarded --out reports/adapters.md`: GRPOTrainer of TRL 1.16, vLLM in its",
            f"process, the demo checkpoint in BF16, {PROMPTS} prompts x {SAMPLES} responses of up to {NEW_TOKENS}",
            f"tokens a step, {STEPS} steps, on a CPU. `guard(trainer, probe=True)` switches the guards on.",
            "",
            "## The same numbers",
            "",
            "Of the run with nothing wrong, what TRL logs beside what the guards see: at the last step, and the",
            "largest relative difference at any step.",
            "",
            "| TRL | mismatch-probe | steps | TRL's | ours | most apart |",
            "|---|---|---|---|---|---|",
            *equal_rows(documents["none"]["logs"]),
            "",
            "## Faults",
            "",
            f"Each begins at step {FAULT_AT}. Weights: of the policy, in the steps whose update was withheld. Applied:",
            "updates that were made under the fault, before a guard answered or between two answers.",
            "",
            "| fault | first seen at step | by | weights | applied | the run | diagnosis |",
            "|---|---|---|---|---|---|---|",
            *(fault_row(fault, document) for fault, document in documents.items()),
            "",
            "## Faults that begin at random",
            "",
            *drawn_lines(scratch),
            "",
            "## Cost",
            "",
            *cost_lines(scratch),
            "",
        ]
    )


if __name__ == "__main__":
    main()
