"""`python -m tests.logs.memory`: of each line, `[FILE, FORMAT]`, the MiB that reading the log takes at most, how many
rows it has and the sentence that it ends with. Each is read in a fork of a process that has read none.
"""

import json
import os
import sys
from pathlib import Path

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import recognise


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure(path: Path, name: str | None) -> None:
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    held, sentence = 0, ""
    try:
        known = recognise(path, name)
        read = known.read if known.prompts is None else known.read_prompts
        for _ in read(path, lambda finding: None):
            held += 1
    except UsageError as error:
        sentence = str(error)
    print(f"{resident_mib('VmHWM') - before:.0f}\t{held}\t{sentence}", flush=True)


def main() -> None:
    for line in sys.stdin:
        path, name = json.loads(line)
        pid = os.fork()
        if pid == 0:
            measure(Path(path), name)
            os._exit(0)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            sys.exit(code)


if __name__ == "__main__":
    main()
