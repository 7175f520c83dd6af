"""Training on two nodes, each a torchrun of its own: as on one rank, ended by a lost node, and gone on with."""

from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from tests.command_line import Answer
from tests.ports import free_port
from tests.train.quick_runs import recorded
from tests.warm_python import warm_python, warm_together

pytestmark = pytest.mark.slow

STEPS = 4


def on_two_nodes(*words: object) -> list[Answer]:
    """The ranks are forked from torchrun: four new interpreters would import for four seconds each."""
    meeting = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    nodes = ("--nnodes", 2, "--nproc-per-node", 1, *meeting)
    program = ("--start-method", "fork", "--run-path", Path(__file__).with_name("node_run.py"), *words)
    return warm_together("torch.distributed.run", *((*nodes, "--node-rank", rank, *program) for rank in range(2)))


def on_one_rank(*words: object) -> None:
    warm_python("tests.train.node_run", *words)


@pytest.fixture(scope="module")
def one_rank(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("one")
    on_one_rank(llama, scratch, STEPS, "start", "whole")
    return scratch / "run"


def rewards(run: Path) -> list[float]:
    return [step["reward/mean"] for step in recorded(run)]


def test_two_nodes_follow_one_rank(llama: Path, one_rank: Path, tmp_path: Path) -> None:
    answers = on_two_nodes(llama, tmp_path, STEPS, "start", "whole")
    assert [answer.returncode for answer in answers] == [ExitCode.PASS] * 2, answers
    assert rewards(tmp_path / "run") == rewards(one_rank)
    norms = [[step["optim/grad_norm"] for step in recorded(run)] for run in (tmp_path / "run", one_rank)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_a_lost_node_ends_the_other_with_one_sentence_and_one_rank_goes_on(
    llama: Path, one_rank: Path, tmp_path: Path
) -> None:
    first, second = on_two_nodes(llama, tmp_path, STEPS, "start", "killed")
    assert first.returncode != ExitCode.PASS
    assert second.returncode != ExitCode.PASS
    sentences = [line for line in first.stderr.splitlines() if line.startswith("mismatch-probe: ")]
    assert len(sentences) == 1, first
    assert "another rank that holds a part of the model is gone" in sentences[0]
    assert len(recorded(tmp_path / "run")) < STEPS
    on_one_rank(llama, tmp_path, STEPS, "resume", "whole")
    assert rewards(tmp_path / "run") == rewards(one_rank)


def test_a_folder_that_the_first_node_cannot_use_ends_both(llama: Path, tmp_path: Path) -> None:
    """The second node does not wait for a run directory that nobody makes."""
    (tmp_path / "run").write_text("a file stands where the folder should be")
    for answer in on_two_nodes(llama, tmp_path, STEPS, "start", "whole"):
        assert answer.returncode != ExitCode.PASS
        sentences = [line for line in answer.stderr.splitlines() if line.startswith("mismatch-probe: ")]
        assert len(sentences) == 1, answer
        assert str(tmp_path / "run") in sentences[0]
