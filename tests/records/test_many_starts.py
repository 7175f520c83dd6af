"""Many processes start in one run directory at the same moment: one gets it, the others are told so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STARTS = 6
ROUNDS = 15
START = """
import json, sys
from multiprocessing import get_context
from pathlib import Path
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.records.files import write_text
from mismatch_probe.records.run_directory import RunDirectory

def start(number):
    for run in runs:
        together.wait()
        try:
            with run.create():
                write_text(run.manifest_path, str(number))
            answers.put((str(run.path), number, "started"))
        except RunDirectoryError as error:
            answers.put((str(run.path), number, str(error)))

starts, rounds = map(int, sys.argv[2:])
runs = [RunDirectory(Path(sys.argv[1]) / f"run-{round}") for round in range(rounds)]
context = get_context("fork")
together, answers = context.Barrier(starts), context.Queue()
children = [context.Process(target=start, args=(number,)) for number in range(starts)]
for child in children:
    child.start()
print(json.dumps([answers.get() for _ in range(starts * rounds)]))
for child in children:
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.slow
def test_of_many_starts_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    words = [sys.executable, "-c", START, str(tmp_path), str(STARTS), str(ROUNDS)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    answers_of_runs: dict[str, dict[int, str]] = {}
    for run, number, answer in json.loads(ended.stdout):
        answers_of_runs.setdefault(run, {})[number] = answer
    assert len(answers_of_runs) == ROUNDS
    for run, answers in answers_of_runs.items():
        assert len(answers) == STARTS
        [winner] = [number for number, answer in answers.items() if answer == "started"]
        lost = [answer for answer in answers.values() if answer != "started"]
        assert all("already holds a run" in one or "another process" in one for one in lost)
        assert (Path(run) / "manifest.json").read_text() == str(winner)
