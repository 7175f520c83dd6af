"""Ctrl-C anywhere is one sentence and 130; a reader that goes away is no failed gate."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from tests.cli.test_bad_input import assert_refused, probe
from tests.simulated_run import Simulation, simulated_run


@pytest.fixture(autouse=True)
def _heed_interrupts() -> Iterator[None]:
    """A shell's background jobs are started deaf to them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["report", "RUN"], "mismatch_probe.cli.report_command.write_report"),
        (["gate", "RUN", "--config", "GATE"], "mismatch_probe.cli.gate_command.run_gate"),
        (["gate", "calibrate", "RUN", "--config", "GATE"], "mismatch_probe.cli.gate_command.load_gate"),
        (["diff", "RUN", "RUN"], "mismatch_probe.difference.runs.difference_of"),
        (["doctor"], "mismatch_probe.compare.examination.examine"),
        (["compare", "--model", "demo", "--out", "NEW"], "mismatch_probe.cli.compare_command.prepare"),
    ],
)
def test_an_interrupt_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], place: str
) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    given = {"RUN": run.path, "GATE": tmp_path / "gate.toml", "NEW": tmp_path / "new"}

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    module, _, name = place.rpartition(".")
    monkeypatch.setattr(import_module(module), name, interrupted)
    answer = probe(*(given.get(word, word) for word in words))
    assert_refused(answer, "mismatch-probe: interrupted", ExitCode.INTERRUPTED)
    assert not (tmp_path / "new").exists()


def test_a_reader_that_goes_away_is_a_sentence_and_no_failed_gate(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    words = [sys.executable, "-m", "mismatch_probe", "report", str(run.path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == ExitCode.ENVIRONMENT
    assert "standard output was closed" in errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
