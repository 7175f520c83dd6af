"""`gate`, `diff` and `report` read files: they run where torch, transformers and vLLM are not installed."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gate.cli import check, gate_file
from tests.simulated_run import Simulation, simulated_run

WITHOUT_ENGINES = """
import io, json, sys
from contextlib import redirect_stderr
for name in ("torch", "transformers", "vllm"): sys.modules[name] = None
from mismatch_probe.__main__ import run
run_directory, config = sys.argv[1:]
commands = {
    "gate": ["gate", run_directory, "--config", config],
    "diff": ["diff", run_directory, run_directory],
    "report": ["report", run_directory],
}
answers = {}
for name, words in commands.items():
    with redirect_stderr(io.StringIO()) as said:
        answers[name] = run(words), said.getvalue()
print(json.dumps({"answers": answers, "loaded": list(sys.modules)}))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The exit code and the words of each command, by its name, and the modules that they loaded."""
    folder = tmp_path_factory.mktemp("runs")
    run = simulated_run(folder / "run", Simulation(num_prompts=64), with_summary=True)
    config = gate_file(folder, "[gate]\nmin_sequences = 64\nmax_sequences = 64\n" + check(metric="kl_k2", max=1))
    words = [sys.executable, "-c", WITHOUT_ENGINES, str(run.path), str(config)]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["gate", "diff", "report"])
def test_no_engine_is_needed(command: str, ended: dict[str, Any]) -> None:
    code, output = ended["answers"][command]
    assert code == 0, output


@pytest.mark.slow
def test_nothing_is_loaded_that_takes_long_and_is_not_needed(ended: dict[str, Any]) -> None:
    assert "pyarrow.dataset" not in ended["loaded"]
