"""What people copy into their CI: it parses, its gate file is accepted, and its commands exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mismatch_probe.cli.commands import app
from mismatch_probe.cli.first_steps import starter_path
from mismatch_probe.gate.config import load_gate

FOLDER = Path(__file__).parents[2] / "examples" / "ci"
FILES = sorted(FOLDER.rglob("*.yml"))
NAMES = ("gate", "baseline")


def scripts(node: Any) -> list[str]:
    """Every shell script of a CI file."""
    if isinstance(node, dict):
        own = [node["run"]] if isinstance(node.get("run"), str) else []
        own += node["script"] if isinstance(node.get("script"), list) else []
        own += node["before_script"] if isinstance(node.get("before_script"), list) else []
        return own + [script for below in node.values() for script in scripts(below)]
    return [script for below in node for script in scripts(below)] if isinstance(node, list) else []


def calls(script: str) -> list[list[str]]:
    """The words after each `mismatch-probe`, up to the end of its command."""
    joined = re.sub(r"\$\{\w+:\+(.*?)\}", r"\1", script.replace("\\\n", " "))
    found = re.findall(r"^\s*mismatch-probe (.*?)(?=$|\|)", joined, flags=re.MULTILINE)
    return [shlex.split(words) for words in found]


def options(command: str) -> set[str]:
    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    if command == "gate":
        found = found.commands["run"]
    return {option for parameter in found.params for option in parameter.opts}


def test_the_gate_file_is_accepted_as_it_is_and_with_the_checks_that_not_every_run_can_answer(tmp_path: Path) -> None:
    """At the beginning nobody has a baseline, and not every run has long responses."""
    (check,) = load_gate(starter_path("gate")).checks
    assert (check.level, check.max_regression, str(check.slice)) == ("error", None, "")
    gate_file = tmp_path / "mismatch.toml"
    first, *optional = starter_path("gate").read_text().split("# [[gate.check]]\n")
    checks = [part.replace("\n# ", "\n").removeprefix("# ") for part in optional]
    text = "[[gate.check]]\n".join([first, *checks])
    gate_file.write_text(text.replace("One pair's", "# One pair's").replace("Against an", "# Against an"))
    assert [(check.max_regression, check.level) for check in load_gate(gate_file).checks] == [
        (None, "error"),
        (None, "warn"),
        (0.1, "error"),
        (None, "warn"),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_ci_file_parses_and_calls_only_what_exists(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    found = [call for script in scripts(content) for call in calls(script)]
    assert found or "uses" in path.read_text()
    for command, *words in found:
        flags = {word for word in words if word.startswith("--")}
        assert flags <= options(command), f"{command}: {flags - options(command)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_script_pastes_an_input_into_the_shell(path: Path) -> None:
    for script in scripts(yaml.safe_load(path.read_text())):
        assert "${{" not in script


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_action_of_others_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    assert [name for name in used if not name.startswith("./") and not re.search(r"@[0-9a-f]{40}$", name)] == []


def test_a_workflow_may_do_no_more_than_it_does() -> None:
    permissions = {
        name: yaml.safe_load((FOLDER / "github" / f"{name}.yml").read_text())["permissions"] for name in NAMES
    }
    assert permissions == {
        "gate": {"contents": "read", "pull-requests": "write"},
        "baseline": {"contents": "write"},
    }


def test_the_action_describes_every_input_it_reads() -> None:
    text = (FOLDER / "github" / "action.yml").read_text()
    action = yaml.safe_load(text)
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    assert all(one["description"] for one in action["inputs"].values())


def test_the_workflows_are_started_by_what_they_say() -> None:
    gate, baseline = (yaml.safe_load((FOLDER / "github" / name).read_text()) for name in ("gate.yml", "baseline.yml"))
    assert set(gate[True]) == {"pull_request"}
    assert set(baseline[True]) == {"workflow_dispatch"}
    assert baseline[True]["workflow_dispatch"]["inputs"]["reason"]["required"]


def test_an_unknown_option_in_a_ci_file_would_be_seen() -> None:
    [[command, *words]] = calls('mismatch-probe compare --model "$M" --gates "$G" || code=$?')
    assert not {word for word in words if word.startswith("--")} <= options(command)
