"""What `compare --dry-run` predicts against what the same comparison then takes, stage by stage and in all.

    python -m benchmarks.cost_model FOLDER CASE...     # runs cases, one after the other, on a quiet machine
    python -m benchmarks.cost_model FOLDER --again     # predicts what FOLDER holds once more, against the same times
    python -m benchmarks.cost_model FOLDER --publish reports/cost-model.md

Each case is predicted twice before it runs: in a folder without other runs, by rates measured then alone, and beside
the cases before it that FOLDER holds. Responses run to their limit, so that lengths are no part of the error, but for
the case `natural`. It ends with 1 where a total lies outside of its interval.
"""

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from pydantic import BaseModel

from mismatch_probe.compare.cost.roofline import Span
from mismatch_probe.compare.estimates import DryRun, Outlook
from mismatch_probe.records.run_directory import RunDirectory
from tests.tiny_models import make_checkpoint

_WIDE: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
_POLL_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Case:
    model: str
    source: str
    num_prompts: int
    max_new_tokens: int
    dtypes: tuple[str, ...]
    ignore_eos: bool = True


CASES: Final = {
    "few": Case("demo", "sums:medium", 8, 64, ("bf16",)),
    "many": Case("demo", "sums:medium", 256, 64, ("bf16", "fp16", "fp32")),
    "long": Case("demo", "sums:long", 32, 1024, ("bf16", "fp16")),
    "natural": Case("demo", "sums:medium", 256, 128, ("bf16", "fp32"), ignore_eos=False),
    "wide": Case("wide", "sums:medium", 16, 32, ("bf16", "fp32")),
    "wide-many": Case("wide", "sums:medium", 64, 48, ("bf16",)),
}


class Stage(BaseModel):
    """One stage's batches (seconds): predicted by rates alone, predicted beside other runs, and measured."""

    name: str
    by_rates: Span
    by_runs: Span
    measured_seconds: float


class Result(BaseModel):
    """Of a case; memory in bytes: the most that a process was predicted to need, and that one was seen to hold."""

    case: str
    stages: list[Stage]
    total_by_rates: Span
    total_by_runs: Span
    wall_seconds: float
    predicted_bytes: int
    seen_bytes: int


def outside(results: Sequence[Result]) -> list[str]:
    """The totals that their intervals miss."""
    totals = [
        (f"{result.case} {how}", result.wall_seconds, span)
        for result in results
        for how, span in (("by rates", result.total_by_rates), ("by runs", result.total_by_runs))
    ]
    return [f"{name}: {seconds:.1f} s" for name, seconds, span in totals if seconds not in span]


def run_case(name: str, folder: Path) -> Result:
    by_rates, by_runs = predictions(name, folder)
    wall, seen = timed(words(CASES[name], folder, folder / "runs" / name))
    return result_of(name, folder, by_rates, by_runs, wall, seen)


def predict_again(recorded: Result, folder: Path) -> Result:
    """By the code as it is now, against the times of a run that is recorded."""
    by_rates, by_runs = predictions(recorded.case, folder)
    return result_of(recorded.case, folder, by_rates, by_runs, recorded.wall_seconds, recorded.seen_bytes)


def predictions(name: str, folder: Path) -> tuple[Outlook, Outlook]:
    """By rates alone, and beside the runs of the cases that stand before this one."""
    earlier_runs = folder / "beside" / name
    earlier_runs.mkdir(parents=True, exist_ok=True)
    for before in list(CASES)[: list(CASES).index(name)]:
        run = (folder / "runs" / before).absolute()
        if run.exists() and not (earlier_runs / before).exists():
            (earlier_runs / before).symlink_to(run)
    return (
        predicted(CASES[name], folder, folder / "alone" / name / "run"),
        predicted(CASES[name], folder, earlier_runs / name),
    )


def result_of(
    name: str, folder: Path, by_rates: Outlook, by_runs: Outlook, wall_seconds: float, seen_bytes: int
) -> Result:
    stages = RunDirectory(folder / "runs" / name).read_manifest().stages
    spans = zip(by_rates.time.stages, by_runs.time.stages, strict=True)
    return Result(
        case=name,
        stages=[
            Stage(
                name=alone.stage,
                by_rates=alone.work,
                by_runs=time_beside.work,
                measured_seconds=stages[alone.stage].seconds,
            )
            for alone, time_beside in spans
        ],
        total_by_rates=by_rates.time.total,
        total_by_runs=by_runs.time.total,
        wall_seconds=wall_seconds,
        predicted_bytes=max(process.peak_bytes for process in by_runs.memory),
        seen_bytes=seen_bytes,
    )


def predicted(case: Case, folder: Path, out: Path) -> Outlook:
    answer = subprocess.run(
        [*words(case, folder, out), "--dry-run", "--json"], capture_output=True, text=True, check=True
    )
    outlook = DryRun.model_validate_json(answer.stdout).outlook
    assert outlook is not None
    return outlook


def words(case: Case, folder: Path, out: Path) -> list[str]:
    config = folder / ("to-the-limit.toml" if case.ignore_eos else "natural.toml")
    config.write_text("[sampling]\nignore_eos = " + str(case.ignore_eos).lower() + "\n")
    model = case.model
    if model == "wide":
        model = str(folder / "wide")
        if not Path(model).exists():
            make_checkpoint(model, "llama", init_std=0.02, **_WIDE)
    command = [sys.executable, "-m", "mismatch_probe", "compare", "--model", model, "--prompts", case.source]
    command += ["--num-prompts", str(case.num_prompts), "--max-new-tokens", str(case.max_new_tokens)]
    command += [word for dtype in case.dtypes for word in ("--dtype", dtype)]
    return [*command, "--config", str(config), "--out", str(out)]


def timed(command: list[str]) -> tuple[float, int]:
    """Wall seconds of a command, and the most memory that one of its processes was seen to hold."""
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    most = [0]

    def watch() -> None:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            for process_below in (root, *_below(root)):
                most[0] = max(most[0], _held(process_below))
            time.sleep(_POLL_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    wall = time.monotonic() - began
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors[-3000:]}")
    return wall, most[0]


def _below(root: psutil.Process) -> list[psutil.Process]:
    try:
        below: list[psutil.Process] = root.children(recursive=True)
        return below
    except psutil.NoSuchProcess:
        return []


def _held(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def introduction(results: Sequence[Result]) -> str:
    cases = " ".join(result.case for result in results)
    return f"""# Predicted and measured times of `compare`

Predicted over measured, with the bounds of the interval; below 1 it took longer than predicted. "By rates alone" is
what `compare --dry-run` says in a folder without other runs, "beside earlier runs" in one with the cases above.

Made by `python -m benchmarks.cost_model FOLDER {cases}` and then `--publish`, on two x86 cores that nobody else used,
without a GPU. The cases are described there.
"""


def lines_of(results: Sequence[Result]) -> list[str]:
    """The tables: of the totals, then of the stages, by what was predicted over what was measured."""
    lines = [
        "| case | wall, s | by rates alone | beside earlier runs | memory, predicted over seen |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        rates, runs = (_ratio(span, result.wall_seconds) for span in (result.total_by_rates, result.total_by_runs))
        memory = result.predicted_bytes / result.seen_bytes
        lines.append(f"| {result.case} | {result.wall_seconds:.1f} | {rates} | {runs} | {memory:.2f} |")
    stages = [(result.case, stage) for result in results for stage in result.stages if stage.measured_seconds]
    lines += ["", "| case | stage | measured, s | by rates alone | beside earlier runs |", "|---|---|---|---|---|"]
    for case, stage in stages:
        rates, runs = (_ratio(span, stage.measured_seconds) for span in (stage.by_rates, stage.by_runs))
        lines.append(f"| {case} | {stage.name} | {stage.measured_seconds:.2f} | {rates} | {runs} |")
    for how, spans in (
        ("by rates alone", [(stage.by_rates, stage.measured_seconds) for _, stage in stages]),
        ("beside earlier runs", [(stage.by_runs, stage.measured_seconds) for _, stage in stages]),
    ):
        held = sum(seconds in span for span, seconds in spans)
        errors = [max(span.likely_seconds / seconds, seconds / span.likely_seconds) for span, seconds in spans]
        lines += ["", f"Stages {how}: {held} of {len(spans)} in their interval; off by {median(errors):.2f} times at "]
        lines[-1] += f"the median, {max(errors):.1f} at most."
    return lines


def _ratio(span: Span, seconds: float) -> str:
    low, likely, high = (bound / seconds for bound in (span.low_seconds, span.likely_seconds, span.high_seconds))
    missed = "" if seconds in span else " MISSED"
    return f"{likely:.2f} ({low:.2f} to {high:.2f}){missed}"


def record(result: Result, folder: Path) -> None:
    (folder / f"{result.case}.json").write_text(result.model_dump_json(indent=2))


def recorded_in(folder: Path) -> list[Result]:
    paths = [folder / f"{name}.json" for name in CASES]
    return [Result.model_validate_json(path.read_text()) for path in paths if path.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--publish", type=Path)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}; give one of {', '.join(CASES)}")
    arguments.folder.mkdir(exist_ok=True)
    for name in arguments.cases:
        record(run_case(name, arguments.folder), arguments.folder)
    results = recorded_in(arguments.folder)
    if arguments.again:
        results = [predict_again(result, arguments.folder) for result in results]
    print("\n".join(lines_of(results)))
    if arguments.publish is not None:
        arguments.publish.write_text("\n".join([introduction(results), *lines_of(results)]) + "\n")
    for missed in outside(results):
        print(f"outside of its interval: {missed}", file=sys.stderr)
    return 1 if outside(results) else 0


if __name__ == "__main__":
    sys.exit(main())
