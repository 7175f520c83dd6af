"""`gate`, `diff` and `report` read files: they run where torch, transformers and vLLM are not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.records.run_directory import RunDirectory
from tests.gate.cli import check, gate_file
from tests.simulated_run import Simulation, simulated_run


@pytest.fixture(scope="module")
def summarised(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    path = tmp_path_factory.mktemp("runs") / "run"
    return simulated_run(path, Simulation(num_prompts=64), with_summary=True)


@pytest.mark.parametrize("command", ["gate", "diff", "report"])
def test_no_engine_is_needed(summarised: RunDirectory, tmp_path: Path, command: str) -> None:
    config = gate_file(tmp_path, "[gate]\nmin_sequences = 64\nmax_sequences = 64\n" + check(metric="kl_k2", max=1))
    words = {
        "gate": ["gate", summarised.path, "--config", config],
        "diff": ["diff", summarised.path, summarised.path],
        "report": ["report", summarised.path],
    }[command]
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'vllm'): sys.modules[name] = None\n"
        f"sys.argv = ['mismatch-probe', *{list(map(str, words))!r}]\n"
        "from mismatch_probe.cli.app import main\n"
        "main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
