"""The default guards on a pretrained checkpoint in real training: clean runs, and injected faults as the inverse.

    python -m benchmarks.guards_on_checkpoint MODEL SCRATCH [--what clean faults] [--only WORD ...] [--lines]

The model is asked for small sums in turns of ChatML and earns the more the nearer the last number of its answer is.
A base model knows no turns and would earn nothing: with --lines sums are lines of a text, and a copy of the checkpoint
ends its answer with the line.
Clean runs train all weights or an adapter, with several rates and numbers of prompts; the last column says how many of
the default guards had their metrics in every step, and how many of these could have stopped the run in as many steps.
A fault is there from a step on that is drawn by the run's name, in a run of its own that goes on for as many steps.
What came of a run is kept in SCRATCH, where a second call goes on.
"""

import argparse
import json
import math
import random
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from benchmarks.training_faults.injection import Inject, Now
from benchmarks.training_faults.kept_outcomes import NotRunError, kept_or_made
from benchmarks.training_faults.outcomes import all_events
from benchmarks.training_faults.runs import LabRun, run_with, small_settings
from benchmarks.training_faults.sampling_faults import labels_shifted, sampling_hidden
from benchmarks.training_faults.scoring_faults import mu_shifted, positions_scaled
from benchmarks.training_faults.sync_faults import layer_scaled, sync_skipped
from benchmarks.training_faults.update_faults import applied_rate, gradients_changed
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.actions import ActionKind
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.guards.rules.base import GuardSettings

PROBLEMS: Final = 64
STEPS: Final = 6
ONSETS: Final = (2, 8)
"""First and last step at which a fault may begin."""
MAX_NEW_TOKENS: Final = 8
_TURN: Final = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TURNS: Final = f"{_TURN.format('3+4=')}7<|im_end|>\n{_TURN}"
"""One sum with its answer, so that answers are short, then the question."""
LINES: Final = "3+4=7\n12+5=17\n6+2=8\n{}"
SERIES: Final = (
    "optim/grad_norm", "mismatch/surprise_mean", "mismatch/surprise_error", "policy/entropy",
    "sync/draw_surprise_mean", "sync/draw_surprise_error", "sync/probe_logit_error",
)  # fmt: skip
_NUMBER: Final = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Run:
    """A run, and its fault from step `onset` on, if any. rank: of the adapter; all weights are trained where None.
    guards: any of them is right.
    """

    seed: int
    rank: int | None
    rate: float
    shape: tuple[int, int] = (2, 2)
    fault: str = ""
    inject: Inject | None = None
    guards: tuple[str, ...] = ()

    @property
    def onset(self) -> int:
        """A step that the name draws; 1 of a run without a fault."""
        return random.Random(self.name).randint(*ONSETS) if self.fault else 1

    @property
    def name(self) -> str:
        how = "full" if self.rank is None else f"LoRA {self.rank}"
        prompts, samples = self.shape
        what = f"{self.fault}; " if self.fault else ""
        return f"{what}{how}, rate {self.rate:g}, {prompts} x {samples}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """firings: `guard at step: what it asked for`. judged: default guards whose metrics every step gave. series: of
    each metric of `SERIES`. fired: the first step at which a right guard fired, and which; early: what fired before
    the fault was there.
    """

    name: str
    steps: int
    firings: list[str]
    stopped: str | None
    rewards: list[float]
    k3: list[float]
    series: dict[str, list[float]]
    onset: int
    judged: list[str]
    response_tokens: float
    seconds: dict[str, float]
    fired: int | None = None
    guard: str | None = None
    early: list[str] = field(default_factory=list)


_SYNC: Final = ("stale-engine", "unsynced-weights", "other-weights")
_LARGE: Final = ("update-size", "update-jump", "reward-collapse")
_APART: Final = ("temperature", "sampling", "mismatch-limit", "mismatch-floor", "mismatch-drift")
_OTHER_SCORES: Final = (*_APART, "engine-weights", "engine-layer")
CLEAN: Final = (
    Run(1, None, 1e-6),
    Run(2, 8, 1e-5),
    Run(3, None, 1e-6, (1, 4)),
    Run(4, 8, 1e-5, (1, 4)),
    Run(5, None, 5e-6),
    Run(6, 8, 1e-4),
    Run(7, None, 1e-5),
    Run(8, 8, 1e-4, (1, 4)),
    Run(9, None, 1e-5, (2, 4)),
    Run(10, 8, 1e-6, (2, 4)),
)
_X50: Final = partial(applied_rate, factor=50)
FAULTS: Final = (
    Run(0, None, 1e-5, (2, 4), fault="sync skipped", inject=sync_skipped, guards=_SYNC),
    Run(0, None, 1e-5, (2, 4), fault="learning rate x 50, applied unseen", inject=_X50, guards=_LARGE),
    Run(0, None, 1e-5, (2, 4), fault="labels shifted by one", inject=labels_shifted, guards=_OTHER_SCORES),
    Run(0, 8, 1e-4, (2, 4), fault="sync skipped", inject=sync_skipped, guards=_SYNC),
    Run(0, 8, 1e-4, (2, 4), fault="learning rate x 50, applied unseen", inject=_X50, guards=_LARGE),
    Run(0, None, 1e-5, (2, 4), fault="log-probs of the engine one token late", inject=mu_shifted, guards=_APART),
    Run(
        *(0, None, 1e-5, (2, 4)),
        fault="one layer x 1.01 on its way to the engine",
        inject=partial(layer_scaled, factor=1.01),
        guards=_SYNC,
    ),
    Run(
        *(0, None, 1e-5, (2, 4)),
        fault="positions of the training path, angles x 1.1",
        inject=partial(positions_scaled, factor=1.1),
        guards=_OTHER_SCORES,
    ),
    Run(
        *(0, None, 1e-5, (2, 4)),
        fault="gradients never unscaled, x 4096",
        inject=partial(gradients_changed, factor=4096),
        guards=("gradient-size",),
    ),
    Run(
        *(0, None, 1e-5, (2, 4)),
        fault="engine samples at temperature 0.7 and says 1",
        inject=partial(sampling_hidden, temperature=0.7),
        guards=("draws", "sampling"),
    ),
)


def near_number(prompt: str, response: str, answer: str | None) -> float:
    """1 where the last number of the response is the answer, less the farther it is; 0 where there is none."""
    numbers = _NUMBER.findall(response)
    return 1 / (1 + abs(int(numbers[-1][:9]) - int(answer or 0))) if numbers else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--what", nargs="*", choices=("clean", "faults"), default=("clean", "faults"))
    parser.add_argument("--only", nargs="*", default=[""], help="runs with one of these words in their name")
    parser.add_argument("--dtype", type=Dtype.parse, default=Dtype.FP16)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run, from its onset on")
    parser.add_argument("--lines", action="store_true", help="sums as lines of a text, for a base model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after as many seconds")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    model, problems = arguments.model.resolve(), _problems(arguments.scratch / "problems.jsonl", TURNS)
    if arguments.lines:
        model, problems = _ends_with_lines(model, arguments.scratch / "model"), _problems(problems, LINES)
    runs = [*(CLEAN if "clean" in arguments.what else ()), *(FAULTS if "faults" in arguments.what else ())]
    for run in (run for run in runs if any(word in run.name for word in arguments.only)):
        slug = "-".join(re.findall(r"[\w.]+", f"{arguments.dtype} {run.name}"))
        make = partial(_made, run, model, problems, arguments.scratch, arguments.dtype, arguments.steps)
        try:
            outcome = Outcome(**kept_or_made(arguments.scratch / f"{slug}.json", partial(_alone, make), until))
        except NotRunError as error:
            print(f"no time left for {error}", flush=True)
            continue
        print(_line(run, outcome), flush=True)


def _alone(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Made in a process of its own: seven runs in one held 14 GiB of SmolLM2, and the system ended them."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(make).result()


def _made(run: Run, model: Path, problems: Path, scratch: Path, dtype: Dtype, steps: int) -> dict[str, Any]:
    settings = _settings(run, model, problems, dtype, run.onset - 1 + steps)
    ran = run_with(scratch / "run", settings, run.inject, Now(run.onset))
    outcome = _outcome(run, ran)
    shutil.rmtree(scratch / "run", ignore_errors=True)
    return asdict(outcome)


def _settings(run: Run, model: Path, problems: Path, dtype: Dtype, steps: int) -> TrainSettings:
    prompts, samples = run.shape
    return small_settings(
        dtype,
        seed=run.seed,
        steps=steps,
        model={"path": str(model)},
        task={
            "source": str(problems),
            "num_problems": PROBLEMS,
            "chat_template": "never",
            "reward": "benchmarks.guards_on_checkpoint:near_number",
        },
        rollout={"prompts": prompts, "samples": samples, "max_new_tokens": MAX_NEW_TOKENS},
        objective={"name": "grpo"},
        optimizer={"learning_rate": run.rate},
        checkpoint={"every": 100},
        policy={} if run.rank is None else {"lora": {"rank": run.rank}},
    )


def _ends_with_lines(model: Path, copy: Path) -> Path:
    """The checkpoint with the newline as the token that ends a response."""
    copy.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (copy / file.name).unlink(missing_ok=True)
        (copy / file.name).symlink_to(file)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    [newline] = tokenizer.encode("\n", add_special_tokens=False)
    for name in ("config.json", "generation_config.json"):
        file = copy / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(settings | {"eos_token_id": newline}), encoding="utf-8")
    return copy


def _problems(path: Path, question: str) -> Path:
    drawn = random.Random(0)
    pairs = [(drawn.randint(1, 20), drawn.randint(1, 20)) for _ in range(PROBLEMS)]
    rows = [{"prompt": question.format(f"{a}+{b}="), "answer": str(a + b)} for a, b in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _outcome(run: Run, ran: LabRun) -> Outcome:
    events, metrics = all_events(ran), list(ran.metrics.values())
    seen = next((event for event in events if event.guard in run.guards and event.step >= run.onset), None)
    names = set.intersection(*(set(step) for step in metrics))
    firings = [f"{event.guard} at {event.step}: {' + '.join(map(str, event.actions))}" for event in events]
    return Outcome(
        name=run.name,
        steps=len(metrics),
        firings=firings,
        stopped=ran.stopped or ran.failed,
        rewards=_of(metrics, "reward/mean"),
        k3=_of(metrics, "mismatch/kl_k3"),
        series={name: _of(metrics, name) for name in SERIES},
        onset=run.onset,
        judged=[guard.name for guard in DEFAULT_GUARDS if names.issuperset(guard.metrics)],
        response_tokens=statistics.mean(_of(metrics, "response/length_mean")),
        seconds={name: statistics.median(_of(metrics, name)) for name in sorted(names) if name.endswith("_seconds")},
        fired=None if seen is None else seen.step,
        guard=None if seen is None else seen.guard,
        early=[text for event, text in zip(events, firings, strict=True) if run.fault and event.step < run.onset],
    )


def _of(metrics: Sequence[dict[str, float]], name: str) -> list[float]:
    return [float(f"{step[name]:.4g}") for step in metrics]


def _line(run: Run, outcome: Outcome) -> str:
    """A row of a table in Markdown."""
    reward = f"{statistics.mean(outcome.rewards[:5]):.2f}, {statistics.mean(outcome.rewards[-5:]):.2f}"
    k3 = f"{statistics.median(outcome.k3):.1e}, {max(outcome.k3):.1e}"
    seen = (
        f"{outcome.guard or 'not seen'} at {outcome.fired} of {outcome.onset}, early: {outcome.early or 'none'}"
        if run.fault
        else ""
    )
    firings = "; ".join(outcome.firings) or "none"
    could_stop = sum(
        guard.name in outcome.judged and _steps_to_stop(guard) <= outcome.steps for guard in DEFAULT_GUARDS
    )
    judged = f"{len(outcome.judged)} of {len(DEFAULT_GUARDS)}, {could_stop}"
    cells = [outcome.name, outcome.steps, f"{outcome.response_tokens:.1f}", reward, k3, seen, firings]
    cells += [outcome.stopped or "no", f"{outcome.seconds['time/step_seconds']:.1f} s", judged]
    return f"| {' | '.join(map(str, cells))} |"


def _steps_to_stop(guard: GuardSettings) -> float:
    """Broken steps after which it stops a run; infinite where it never does."""
    for firing, actions in enumerate(guard.actions, start=1):
        if any(action.kind is ActionKind.STOP for action in actions):
            return firing * guard.patience + guard.steps_of_a_value - 1
    return math.inf


if __name__ == "__main__":
    main()
