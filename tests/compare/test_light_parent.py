"""The command itself loads nothing that a job of it loads anyway."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lent_servers import lend

CODE = """
import sys
from tests.lent_servers import borrow
borrow({descriptors})
from mismatch_probe.compare.preparation import prepare
from mismatch_probe.compare.run import execute
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.report.page import write_report
values = {"model": {"path": "demo"}, "prompts": {"source": "sums:easy", "num_prompts": 2}}
assert len(prepare(parse_settings(CompareSettings, values)).prompts) == 2
print("LOADED", [name for name in ("torch", "transformers", "vllm", "pandas", "httpx") if name in sys.modules])
"""


@pytest.mark.slow
def test_preparing_a_comparison_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    lent = lend()
    words = [sys.executable, "-c", CODE.replace("{descriptors}", repr(lent))]
    answer = subprocess.run(words, capture_output=True, text=True, check=False, pass_fds=tuple(lent.values()))
    assert answer.stdout.splitlines()[-1:] == ["LOADED []"], answer
