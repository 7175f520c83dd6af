"""The whole GitHub action as a runner takes it: every step, condition, expression and output of its YAML."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.examples.test_github_steps import FOLDER, KEPT, REGRESSION, Job, idle_job, job, needs_jq, program
from tests.examples.whole_job import WholeJob
from tests.gate.cli import gate_file
from tests.tiny_models import make_checkpoint

__all__ = ["idle_job", "job", "program"]

PULL_REQUEST = {"token": "secret", "event_name": "pull_request", "event.pull_request.number": "5"}
FEW = "[gate]\nmin_sequences = 4\nmax_sequences = 4\nmin_prompts = 4\n"
GIVEN = {"model": "ckpt", "dtype": "fp32", "prompts": "sums:easy", "max-new-tokens": "8"}
UPLOAD = "actions/upload-artifact"


def requirements_of(job: Job) -> None:
    (job.folder / "requirements").mkdir()
    shutil.copy(FOLDER.parent / "mismatch-probe.txt", job.folder / "requirements")


@needs_jq
@pytest.mark.slow
def test_a_first_pull_request_without_a_baseline_is_compared_judged_commented_and_kept(job: Job) -> None:
    make_checkpoint(job.folder / "ckpt", "llama")
    requirements_of(job)
    gate_file(job.folder, FEW + KEPT + REGRESSION)
    done = WholeJob(job, FOLDER / "action.yml", GIVEN | {"out": "runs/of this job"}, PULL_REQUEST)
    assert done.code == 0
    assert done.ran == ["Install", "Compare", "Gate", "Comment", "Keep the run"]
    assert job.commands_asked[0] == "python -m pip install --requirement requirements/mismatch-probe.txt"
    assert done.outputs == {"run": "runs/of this job", "answer": "pass"}
    assert "no baseline yet" in job.summary.read_text()
    [comment] = job.comments
    assert "mismatch-probe gate: pass" in comment["body"]
    assert "no baseline yet" in comment["body"]
    assert done.kept[UPLOAD]["name"] == "runs-of-this-job"
    kept = job.folder / done.kept[UPLOAD]["path"]
    assert {"report.html", "gate.json", "gate.md", "junit.xml", "summary.json"} <= {
        path.name for path in kept.iterdir()
    }


@pytest.mark.slow
def test_a_comparison_that_cannot_be_made_ends_the_job_and_a_push_gets_no_comment(job: Job) -> None:
    """The doctor, which imports vLLM in an interpreter of its own, is real in the job that ends well."""
    requirements_of(job)
    job.only_note("doctor")
    gate_file(job.folder, FEW + KEPT)
    done = WholeJob(job, FOLDER / "action.yml", GIVEN | {"model": "none"}, {"token": "secret", "event_name": "push"})
    assert done.code == 2
    assert done.ran == ["Install", "Compare", "Keep the run"]
    assert job.commands_asked[-1] == "mismatch-probe doctor"
    assert done.outputs["answer"] == ""
    assert job.comments == []


def test_an_input_that_the_action_has_not_is_seen(idle_job: Job) -> None:
    with pytest.raises(AssertionError, match="no input"):
        WholeJob(idle_job, FOLDER / "action.yml", GIVEN | {"modl": "none"}, PULL_REQUEST)


def test_every_input_of_the_workflow_is_one_of_the_action(tmp_path: Path) -> None:
    """Where a workflow misspells one, the runner only warns, and the default is taken."""
    action = yaml.safe_load((FOLDER / "action.yml").read_text())
    uses = [
        step
        for file in ("gate.yml", "baseline.yml")
        for step in next(iter(yaml.safe_load((FOLDER / file).read_text())["jobs"].values()))["steps"]
        if "mismatch" in str(step.get("uses", "")) or str(step.get("uses", "")).startswith("./")
    ]
    assert uses
    for step in uses:
        assert step["with"].keys() <= action["inputs"].keys()
