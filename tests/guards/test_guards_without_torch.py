"""Other trainers can carry the guards: nothing of them needs an engine or torch."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_guards_are_evaluated_where_torch_is_not_installed() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'vllm'): sys.modules[name] = None\n"
        "from mismatch_probe.guards import book, diagnose, rules\n"
        "assert book.GuardBook(rules.DEFAULT_GUARDS).state()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer
