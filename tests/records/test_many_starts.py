"""Many processes start in one run directory at the same moment: one gets it, the others are told so."""

import subprocess
import sys
from pathlib import Path

STARTS = 6
ROUNDS = 15
START = """
import sys, time
from pathlib import Path
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.run_directory import RunDirectory

name, folder = sys.argv[1], Path(sys.argv[2])
for round in range(int(sys.argv[3])):
    run = RunDirectory(folder / f"run-{round}")
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with run.created():
            write_text(run.manifest_path, name)
        print("started", flush=True)
    except RunDirectoryError as error:
        print(error, flush=True)
"""


def test_of_many_starts_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", START, str(number), str(tmp_path), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(STARTS)
    ]

    def said() -> list[str]:
        return [child.stdout.readline().strip() for child in children if child.stdout is not None]

    for round in range(ROUNDS):
        assert said() == ["ready"] * STARTS
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        answers = said()
        assert answers.count("started") == 1, answers
        assert all("already holds a run" in one or "another process" in one for one in answers if one != "started")
        assert (tmp_path / f"run-{round}" / "manifest.json").read_text() == str(answers.index("started"))
    for child in children:
        child.communicate()
        assert child.returncode == 0
