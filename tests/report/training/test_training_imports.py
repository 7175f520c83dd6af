"""The page of a training run is made where no engine is installed."""

import subprocess
import sys

import pytest

REFUSE_ENGINES = """
import sys, tempfile
from pathlib import Path
for name in ("torch", "transformers", "vllm", "tokenizers"):
    sys.modules[name] = None
from mismatch_probe.report.training.page import write_training_report
from tests.report.training.training_runs import training_run
with tempfile.TemporaryDirectory() as folder:
    run = training_run(Path(folder) / "run")
    write_training_report([run], run.report_path)
    assert run.report_path.stat().st_size > 10_000
heavy = {"typer", "mismatch_probe.engines", "mismatch_probe.training_path", "mismatch_probe.train"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_training_page_is_rendered_without_any_engine() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE_ENGINES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.strip() == "[]"
