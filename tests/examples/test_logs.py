"""The log that ships as an example has the answer that its README prints."""

from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import probe

LOGS = Path(__file__).parents[2] / "examples" / "logs"
DEPARTURE = "temperature 0.700, where the log declares 1."
ANSWER = f"Bug: the engine's side (mu) departs from its declared settings: {DEPARTURE}"


@pytest.mark.slow
def test_the_log_that_ships_and_its_checkpoint_end_in_the_sentence_of_its_readme(tmp_path: Path) -> None:
    words = ("import", LOGS / "demo-temperature.jsonl", "--model", "demo", "--step", 12, "--out", tmp_path / "run")
    answer = probe(*words, code=ExitCode.PASS)
    assert ANSWER in " ".join(answer.stdout.split())
    assert ANSWER in (LOGS / "README.md").read_text(encoding="utf-8")
