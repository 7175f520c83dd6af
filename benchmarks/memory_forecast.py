"""Memory that `compare --dry-run` says each job needs, and the most that the job's process was seen to hold.

    python -m benchmarks.memory_forecast MODEL OUT [--prompts FILE] [--num-prompts 4] [--max-new-tokens 16] [--dtype D]

The job is read from the stage that the command is at, and its start counts with it; the process is the largest one
below it, by resident memory.
"""

import argparse
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Final

import psutil

from mismatch_probe.compare.estimates import DryRun

_POLL_SECONDS: Final = 0.1
_STAGE: Final = re.compile(r"stage \d+ of \d+[^:]*: (\S+)$")
_OF_ENGINE: Final = re.compile(r"(?:sample|replay|distributions)-(?:infer-)?([a-z0-9]+)")
TRAINING: Final = "training-path"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", default="examples/prompts/chats.jsonl")
    parser.add_argument("--num-prompts", default="4")
    parser.add_argument("--max-new-tokens", default="16")
    parser.add_argument("--dtype", nargs="*", default=["bf16", "fp32"])
    options = parser.parse_args()
    words = [sys.executable, "-m", "mismatch_probe", "compare", "--model", options.model, "--prompts", options.prompts]
    words += [
        "--num-prompts",
        options.num_prompts,
        "--max-new-tokens",
        options.max_new_tokens,
        "--out",
        str(options.out),
    ]
    words += [word for dtype in options.dtype for word in ("--dtype", dtype)]
    answer = subprocess.run([*words, "--dry-run", "--json"], capture_output=True, text=True, check=True)
    outlook = DryRun.model_validate_json(answer.stdout).outlook
    assert outlook is not None
    seen = watched(words)
    print("| job | foretold, GiB | seen, GiB | foretold / seen | in stage |\n|---|---|---|---|---|")
    for job in outlook.memory:
        stages = {stage: held for stage, held in seen.items() if job_of(stage) == job.process}
        worst = max(stages, key=lambda stage: stages[stage], default="")
        held = stages.get(worst, 0)
        ratio = f"{job.peak_bytes / held:.2f}" if held else "not seen"
        print(f"| {job.process} | {job.peak_bytes / 2**30:.2f} | {held / 2**30:.2f} | {ratio} | {worst} |")
    print("\n| stage | seen, GiB |\n|---|---|")
    for name, held in seen.items():
        print(f"| {name} | {held / 2**30:.2f} |")


def watched(words: list[str]) -> dict[str, int]:
    """The most bytes that a process held while the command was at each stage."""
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, bufsize=1)
    most: defaultdict[str, int] = defaultdict(int)
    stage, starting = [""], [0]

    def watch() -> None:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            held, now = largest_below(root), stage[0]
            if now:
                most[now] = max(most[now], held, starting[0])
            starting[0] = 0 if now else max(starting[0], held)
            threading.Event().wait(_POLL_SECONDS)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        if "stage " in line:
            match = _STAGE.search(line.rstrip())
            stage[0] = match.group(1) if match and "-" in match.group(1) else ""
    process.wait()
    watcher.join()
    if process.returncode:
        sys.exit("the comparison failed; its messages stand above")
    return most


def job_of(stage: str) -> str:
    engine = _OF_ENGINE.fullmatch(stage.removesuffix("-alone").removesuffix("-decoded").removesuffix("-cached"))
    return TRAINING if engine is None else f"engine-{engine.group(1)}"


def largest_below(root: psutil.Process) -> int:
    try:
        return max((int(child.memory_info().rss) for child in root.children(recursive=True)), default=0)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


if __name__ == "__main__":
    main()
