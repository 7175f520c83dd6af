import subprocess
import sys

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
