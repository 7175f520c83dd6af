"""`python -m tests.logs.memory FILE [FORMAT]`: MiB that reading a log takes at most, and the sentence it ends with."""

import sys
from pathlib import Path

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import recognise


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def main(path: Path, name: str | None = None) -> None:
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
    print(f"{resident_mib('VmHWM') - before:.0f}\t{held}\t{sentence}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
