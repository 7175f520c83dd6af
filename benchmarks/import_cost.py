"""What it costs to import and analyse a large log, beside reading the file alone.

    python -m benchmarks.import_cost SCRATCH [--million-tokens 100] [--format parquet|jsonl]

Makes a plain log of responses of 500 tokens (its numbers are random: what is measured is time and memory), imports it
in a process of its own, and reads the same file in another one: column by column for parquet, line by line for JSONL.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_TOKENS = 500
_PROMPT = 100
_ROWS_A_GROUP = 1000
_RESPONSES_A_STEP = 2000

_READ = {
    "parquet": "import sys, pyarrow.parquet as pq\nfor batch in pq.ParquetFile(sys.argv[1]).iter_batches(): pass",
    "jsonl": "import sys, json\nfor line in open(sys.argv[1], 'rb'): json.loads(line)",
}


def _rows(number: int, count: int) -> dict[str, list[object]]:
    random = np.random.default_rng(number)
    log_mu = -0.01 - random.exponential(0.5, (count, _TOKENS))
    log_pi = log_mu + random.normal(0, 0.003, (count, _TOKENS))
    steps = [(number * _ROWS_A_GROUP + row) // _RESPONSES_A_STEP for row in range(count)]
    return {
        "prompt_token_ids": list(random.integers(0, 100_000, (count, _PROMPT), dtype=np.int32)),
        "token_ids": list(random.integers(0, 100_000, (count, _TOKENS), dtype=np.int32)),
        "logprobs": list(log_mu),
        "train_logprobs": list(log_pi),
        "step": list(steps),
    }


def _groups(num_responses: int) -> Iterator[dict[str, list[object]]]:
    for number, start in enumerate(range(0, num_responses, _ROWS_A_GROUP)):
        yield _rows(number, min(_ROWS_A_GROUP, num_responses - start))


def _write(path: Path, num_responses: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for group in _groups(num_responses):
                for row in zip(*group.values(), strict=True):
                    values = [value.tolist() if isinstance(value, np.ndarray) else value for value in row]
                    file.write(json.dumps(dict(zip(group, values, strict=True))) + "\n")
        return
    first = pa.table(_rows(0, 1))
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        for group in _groups(num_responses):
            writer.write_table(pa.table(group, schema=first.schema))


def _timed(command: list[str]) -> tuple[float, float]:
    """Seconds, and gigabytes of memory at most, of a process."""
    measured = (
        "import resource, subprocess, sys, time\nbegun = time.monotonic()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    answer = subprocess.run([sys.executable, "-c", measured, *command], check=True, capture_output=True, text=True)
    seconds, kilobytes = map(float, answer.stdout.split())
    return seconds, kilobytes / 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--million-tokens", type=float, default=100)
    parser.add_argument("--format", choices=tuple(_READ), default="parquet")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    log, run = options.scratch / f"log.{options.format}", options.scratch / "run"
    shutil.rmtree(run, ignore_errors=True)
    _write(log, int(options.million_tokens * 1e6 / _TOKENS))
    read = _timed([sys.executable, "-c", _READ[options.format], str(log)])
    imported = _timed([sys.executable, "-m", "mismatch_probe", "import", str(log), "--out", str(run)])
    print(f"{options.million_tokens:g} million tokens of {options.format}, {log.stat().st_size / 1e9:.2f} GB")
    print(f"read alone: {read[0]:.0f} s, {read[1]:.2f} GiB")
    times = imported[0] / read[0]
    print(f"import with statistics and report: {imported[0]:.0f} s, {imported[1]:.2f} GiB; {times:.1f} times")


if __name__ == "__main__":
    main()
