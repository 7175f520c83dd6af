"""What a run of many tokens costs once its legs are recorded: statistics and verdict, the report, and the gate.

    python -m benchmarks.large_run [--tokens 1000000 3000000 10000000]

Each run is written with simulated log-probs and hostile token texts, and each command measured as a process of its own:
wall time, processor time (which other work on the machine does not lengthen), peak memory (resident set), the size of
`report.html`, and how long a browser takes from opening it until its first drawing answers (the median of three fresh
browsers; left out where there is none).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import ROLLOUTS, ids_key, leg_rows, prompts_table, write_table
from tests.report.browser import BROWSER, browser_tab
from tests.simulated_run import Simulation, simulated_manifest, simulated_prompts

MEAN_LENGTH = 500
NUM_BROWSERS = 3
ERRORS_NATS = {"infer-bf16-decode": 0.01, "train-bf16": 0.01, "ref-fp32": 0.0}
TOKEN_TEXT = "<script>alert(1)</script>"
GATE_FILE = '[gate]\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 1\n'
COMMANDS = {
    "statistics, verdict and report (`report --recompute`)": ("report", "--recompute"),
    "report from its records (`report`)": ("report",),
    "gate with one limit (`gate`)": ("gate",),
}

Array = npt.NDArray[Any]


def write_run(path: Path, num_tokens: int) -> RunDirectory:
    """A finished run of BF16 against BF16 with an FP32 reference; each response's errors share a heavy-tailed scale."""
    random = np.random.default_rng(0)
    simulation = Simulation(num_prompts=num_tokens // MEAN_LENGTH)
    prompts = simulated_prompts(simulation)
    lengths = random.integers(MEAN_LENGTH // 10, 2 * MEAN_LENGTH - MEAN_LENGTH // 10, len(prompts))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_ids = random.integers(0, 1000, offsets[-1], dtype=np.int32)
    run = RunDirectory(path)
    run.path.mkdir(parents=True)
    write_table(run.prompts_path, prompts_table(prompts))
    ids = [f"{prompt.prompt_id}/0@infer-bf16" for prompt in prompts]
    responses = np.split(token_ids, offsets[1:-1])
    keys = [ids_key(prompt.token_ids, response.tolist()) for prompt, response in zip(prompts, responses, strict=True)]
    texts = pa.array([TOKEN_TEXT]).take(pa.array(np.zeros(token_ids.size, dtype=np.int32)))
    columns = {
        "id": ids,
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "sampler": ["infer-bf16"] * len(ids),
        "seed": list(range(len(ids))),
        "prompt_token_ids": [prompt.token_ids for prompt in prompts],
        "token_ids": _lists(offsets, pa.array(token_ids)),
        "token_texts": _lists(offsets, texts),
        "finish_reason": ["stop"] * len(ids),
    }
    write_table(run.rollouts_path, pa.table(columns, schema=ROLLOUTS))
    log_ref = -0.01 - random.exponential(1.0, token_ids.size) * (random.random(token_ids.size) < 0.5)
    for leg, error in ERRORS_NATS.items():
        scale = np.repeat(error * random.lognormal(0, 0.3, len(ids)), lengths)
        log_probs = np.minimum(log_ref + scale * random.standard_t(5, token_ids.size), 0).astype(np.float32)
        scored = {"id": ids, "ids_key": keys, "logprobs": _lists(offsets, pa.array(log_probs))}
        write_table(run.leg_path(leg), leg_rows(scored))
    run.write_manifest(simulated_manifest(simulation))
    return run


def _lists(offsets: Array, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def measure(words: list[str]) -> str:
    """Wall and processor time in seconds and peak memory in GiB of one call of the command line."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_probe", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"mismatch-probe {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    wall, processor = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    return f"{wall:.1f} s ({processor:.1f} s), {usage.ru_maxrss / 2**20:.2f} GiB"


def until_interactive(page: Path) -> str:
    """Seconds on the browser's own clock, which starts with the navigation."""
    if BROWSER is None:
        return "no browser"
    times = []
    for _ in range(NUM_BROWSERS):
        with browser_tab() as tab:
            tab.open(page)
            tab.wait("document.querySelector('.main-svg')")
            times.append(tab.run("performance.now()") / 1000)
    return f"{statistics.median(times):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    arguments = parser.parse_args()
    print(f"| tokens | responses | {' | '.join(COMMANDS)} | `report.html` | interactive after |")
    print("|---|---|" + "---|" * len(COMMANDS) + "---|---|")
    for num_tokens in arguments.tokens:
        with tempfile.TemporaryDirectory() as folder:
            run = write_run(Path(folder) / "run", num_tokens)
            gate_file = Path(folder) / "mismatch.toml"
            gate_file.write_text(GATE_FILE)
            cells = []
            for command, *flags in COMMANDS.values():
                more = ["--config", str(gate_file)] if command == "gate" else flags
                cells.append(measure([command, str(run.path), *more]))
            cells += [f"{run.report_path.stat().st_size / 1e6:.2f} MB", until_interactive(run.report_path)]
        print(f"| {num_tokens:,} | {num_tokens // MEAN_LENGTH:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
