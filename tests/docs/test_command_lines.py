"""Every command line of the documents and of the help is accepted by the real program, and run where that is quick.

A line in a code block is run here; or its command starts an engine, loads a model or trains, and the line is parsed
only (`PARSED_ONLY` names the test that runs the command, and `test_lines_as_written.py` runs the line); or its comment
says that it needs a GPU. Another line fails.
"""

import importlib.util
import json
import re
import shutil
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import typer

from mismatch_probe.cli.commands import app
from mismatch_probe.cli.compare import side_values
from mismatch_probe.cli.first_steps import STARTERS, starter_path
from mismatch_probe.cli.options import PROGRAM, TYPER_ERROR, given_by
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import AuditSettings, HeadroomSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.config.train import TrainSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.reading import nest_names
from tests.docs.command_lines import CommandLine, command_lines, lines_of, mentions
from tests.docs.pages import ROOT, Page
from tests.gate.cli import CommandLine as Run
from tests.importing.logs import rows, write
from tests.simulated_run import Simulation, simulated_run

OURS = [line for line in command_lines() if line.program == "mismatch-probe"]
OTHERS = [line for line in command_lines() if line.program != "mismatch-probe"]

PARSED_ONLY = {
    "compare": "tests/compare/test_compare.py",
    "train": "tests/train/test_train_command.py",
    "sanity": "tests/train/test_sanity_command.py",
    "ablate": "tests/ablate/test_ablate_command.py",
    "evaluate": "tests/evaluate/test_evaluate_command.py",
    "localize": "tests/localize/test_command.py",
    "headroom": "tests/headroom/test_command.py",
    "explain": "tests/importing/test_score_and_explain.py",
    "audit": "tests/servers/test_audit.py",
    "doctor": "tests/servers/test_server_end_to_end.py",
    "score": "tests/importing/test_score_and_explain.py",
}
"""Commands that start an engine, load a model or train, and the test that runs each for real."""

QUICKLY = {"watch": ["--idle", "0"]}
"""What is added to a command that would wait for more."""

ANSWERS = {"gate": {ExitCode.PASS, ExitCode.GATE_FAILED}}
"""Exit codes of a command that worked; 0 elsewhere."""


_SIDES = ("dtype", "train_dtype", "infer_dtype", "train", "infer")

SETTINGS = {"compare": CompareSettings, "train": TrainSettings, "headroom": HeadroomSettings, "audit": AuditSettings}
"""What the flags of a command are held against before it looks at any file."""


def named(line: CommandLine) -> str:
    return f"{line.page}: {line.text}"


def accept(words: list[str]) -> None:
    """Have the real program take words apart, hold them against its settings, and do nothing.

    Raises:
        TYPER_ERROR, UsageError: it does not accept them.
    """
    command: Any = typer.main.get_command(app)
    context = command.make_context(PROGRAM, list(words))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    values = given_by(getattr(command.callback, "flags", {}), context)
    if name == "compare":
        values |= nest_names(side_values(*(context.params[each] for each in _SIDES)))
    if name in SETTINGS and "model" in values:
        parse_settings(SETTINGS[name], values)


@pytest.mark.parametrize("line", [*OURS, *mentions()], ids=named)
def test_the_program_accepts_the_line(line: CommandLine) -> None:
    accept(line.words[1:])


@pytest.mark.parametrize(
    "text",
    [
        "mismatch-probe compare --modl demo",
        "mismatch-probe compare --model demo --infer fp8kv:dtpe=bf16",
        "mismatch-probe comprae --model demo",
        "mismatch-probe report",
        "mismatch-probe gate run --config",
        "mismatch-probe train --steps many",
        "mismatch-probe train --model demo --train-dtype bf17",
        "mismatch-probe compare --model demo --dtype bf17",
        "mismatch-probe score RUN --model demo --no-engin",
    ],
)
def test_a_line_that_the_program_does_not_accept_is_seen(text: str) -> None:
    with pytest.raises((TYPER_ERROR, UsageError)):
        accept(CommandLine("", text).words[1:])


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the lines of the documents read, by the names that they use."""
    simulation = Simulation(mean_length=400, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32)))
    for run in ("mine", "before", "after"):
        simulated_run(tmp_path / "runs" / run, simulation, with_summary=True)
    shutil.copy(ROOT / "tests" / "logs" / "metric_data" / "prime_rl.jsonl", tmp_path / "metrics.jsonl")
    first_step = {"loss/mean": 0.1, "optim/grad_norm": 0.2, "entropy/all/mean": 0.5, "mismatch_kl/all/mean": 1e-3}
    for layout in ("tp1", "tp2"):
        (tmp_path / f"metrics-{layout}.jsonl").write_text(json.dumps({"step": 1, **first_step}), encoding="utf-8")
    (tmp_path / "logs").mkdir()
    for step in range(1, 6):
        write(tmp_path / "logs" / f"step_{step}.jsonl", rows(step=step))
    for kind in ("gate", "guards"):
        (tmp_path / STARTERS[kind].file).write_text(starter_path(kind).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "CHECKPOINT").symlink_to(files("mismatch_probe") / "demo_checkpoint")  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    return tmp_path


def name_floor(gate_file: Path) -> None:
    """As the file's comment says, so that there is a floor to write."""
    text = gate_file.read_text(encoding="utf-8")
    assert "# floor = " in text
    gate_file.write_text(text.replace("# floor = ", "floor = "), encoding="utf-8")


def is_run(line: CommandLine) -> bool:
    loads_a_model = line.words[1] in PARSED_ONLY or (line.words[1] == "import" and "--model" in line.words)
    return not line.needs_gpu and (not loads_a_model or "--weights-only" in line.words)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in OURS if is_run(line)], ids=named)
def test_the_line_works(line: CommandLine, workplace: Path, command_line: Run) -> None:
    command, *words = line.words[1:]
    if (command, words[0]) == ("gate", "calibrate"):
        name_floor(workplace / STARTERS["gate"].file)
    if command == "init":
        (workplace / STARTERS[words[0]].file).unlink(missing_ok=True)
    ended = command_line(command, *words, *QUICKLY.get(command, ()))
    assert ended.code in ANSWERS.get(command, {ExitCode.PASS}), ended


def test_every_command_that_is_parsed_only_is_run_by_the_test_that_is_named() -> None:
    assert PARSED_ONLY.keys() <= {line.words[1] for line in OURS}
    for command, test in PARSED_ONLY.items():
        assert f'"{command}"' in (ROOT / test).read_text(encoding="utf-8"), command


def fault_of(line: CommandLine) -> str | None:
    """What is wrong with a line of another program, as far as this repository can tell."""
    program, *words = line.words
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        return None if set(words) <= targets else "no such target"
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        extras_asked_for = {
            extra for word in words for part in re.findall(r"\[(.+)\]", word) for extra in part.split(",")
        }
        return None if extras_asked_for <= extras.keys() else "no such extra"
    if program == "python" and words[0].endswith(".py"):
        return None if (ROOT / words[0]).exists() else "no such file"
    if program == "python" and words[0] == "-m" and words[1].startswith("benchmarks"):
        return None if importlib.util.find_spec(words[1]) else "no such module"
    return None if line.needs_gpu or line.text in OF_OTHERS else "neither run, nor parsed, nor marked as needing a GPU"


OF_OTHERS = {
    "python -m verl.trainer.main_ppo ... actor_rollout_ref.rollout.calculate_log_probs=True +trainer.guards=default",
}
"""Lines of other trainers, which are no packages of the tests."""


@pytest.mark.parametrize("line", OTHERS, ids=named)
def test_a_line_of_another_program_names_what_is_there(line: CommandLine) -> None:
    assert fault_of(line) is None


@pytest.mark.parametrize(
    "text",
    ["make demon", "pip install '.[vlm-cuda]'", "python scripts/none.py", "torchrun --nproc-per-node 8 -m other"],
)
def test_a_fault_in_a_line_of_another_program_is_seen(text: str) -> None:
    [line] = lines_of(Page(ROOT / "README.md", f"```\n{text}\n```\n"))
    assert fault_of(line) is not None


def test_a_line_that_starts_the_module_is_taken_apart_as_the_programs_own() -> None:
    [line] = lines_of(Page(ROOT / "README.md", "```\ntorchrun --nnodes 2 -m mismatch_probe train --modl M\n```\n"))
    assert line.words == ["mismatch-probe", "train", "--modl", "M"]
    with pytest.raises((TYPER_ERROR, UsageError)):
        accept(line.words[1:])


def test_a_line_that_needs_a_gpu_says_so() -> None:
    [line] = lines_of(Page(ROOT / "README.md", "```\ntorchrun x    # needs a GPU: eight of them\n```\n"))
    assert line.needs_gpu
    assert fault_of(line) is None
