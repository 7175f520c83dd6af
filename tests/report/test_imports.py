"""The report reads records: it works where no engine is installed."""

import subprocess
import sys

import pytest

REFUSE_ENGINES = """
import sys
for name in ("torch", "transformers", "vllm", "tokenizers"):
    sys.modules[name] = None
from tests.report import samples
from mismatch_probe.report.page import render_html
assert len(render_html(samples.summary((("bf16", "bf16"),)), samples.manifest())) > 10_000
heavy = {"typer", "mismatch_probe.engines", "mismatch_probe.training_path"}
print(sorted(heavy & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_page_is_rendered_without_any_engine() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE_ENGINES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.strip() == "[]"
