"""`compare` over ranks that torchrun starts: killed, gone on with over another number of them, and with one lost."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests import halts
from tests.command_line import Answer
from tests.halts import is_begun, wait_until
from tests.processes import descendants, ended
from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_python, warm_ranks, warm_ranks_with_one_killed

pytestmark = pytest.mark.slow

ADDED = ("--train", "more:dtype=bf16,attention=eager", "--infer", "bf16")


def probe(*words: object) -> None:
    """On as many cores as the ranks have: a run goes on with as many as it was begun with."""
    warm_python("mismatch_probe", *words, every_core=True)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose responses are sampled, and scored over two ranks in as many batches as there are responses."""
    home = tmp_path_factory.mktemp("ranks")
    model = make_checkpoint(home / "model", "qwen3", num_attention_heads=4, num_key_value_heads=2)
    config = home / "small.toml"
    config.write_text("[training]\nbatch_tokens = 48\n[floors]\nnum_sequences = 2\n[full_vocabulary]\npositions = 8\n")
    flags = ("--prompts", "sums:easy", "--num-prompts", 8, "--max-new-tokens", 32, "--vllm.enforce_eager", "true")
    sides = ("--dtype", "bf16", "--train-ranks", 2)
    probe("compare", "--model", model, *flags, *sides, "--config", config, "--out", home / "run")
    return home / "run"


@pytest.fixture
def run(sampled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sampled, tmp_path / "run")


@pytest.fixture(scope="module")
def complete_run(sampled: Path) -> Path:
    """The same run with the side that is added, uninterrupted."""
    run = shutil.copytree(sampled, sampled.parent / "whole")
    probe("compare", "--out", run, "--resume", *ADDED)
    return run


def leg(run: Path, name: str) -> dict[str, Any]:
    return read_table(run / "legs" / f"{name}.parquet").to_pydict()


def torchrun(ranks: int, point: str, *words: object, on_start: Callable[[int], None]) -> Answer:
    """The command halts at that point (`tests/halts.py`). By torchrun's own program, with ranks forked from it."""
    started = ("--standalone", "--nproc-per-node", ranks, "--start-method", "fork", "--run-path")
    return warm_python("torch.distributed.run", *started, halts.__file__, point, *words, on_start=on_start, code=None)


def first_rank(torchrun_pid: int) -> int:
    children = Path(f"/proc/{torchrun_pid}/task/{torchrun_pid}/children").read_text()
    return min(map(int, children.split()))


def test_a_side_that_divides_products_stands_beside_one_over_ranks(run: Path) -> None:
    sides = ("--train", "tp:dtype=bf16,tensor_parallel=2", "--infer", "bf16")
    probe("compare", "--out", run, "--resume", *sides)
    summary = json.loads((run / "summary.json").read_text())
    assert [pair["train"] for pair in summary["pairs"]] == ["bf16", "tp"]
    settings = RunDirectory(run).read_manifest().stages["score-train-tp"].effective_settings
    assert settings["tensor_parallel"] == 2
    assert 0 < settings["ranks"]["against_whole"]["difference"] < 0.5


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_killed_torchrun_goes_on_over_another_number_of_ranks_to_the_same_bits(
    ranks: int, run: Path, complete_run: Path
) -> None:
    words = ("compare", "--out", run, "--resume", *ADDED)

    def kill(pid: int) -> None:
        wait_until(lambda: is_begun(run, "score-train-more"), "a part", pid)
        os.kill(first_rank(pid), signal.SIGKILL)

    answer = torchrun(2, "after-part:score-train-more", *words, on_start=kill)
    assert answer.returncode != ExitCode.PASS, answer
    assert [part.name for part in (run / "parts" / "score-train-more").iterdir()] == ["000000-train-more.parquet"]
    if ranks == 1:
        probe(*words, "--train-ranks", 1)
    else:
        warm_ranks(ranks, "mismatch_probe", *words)
    assert leg(run, "train-more") == leg(complete_run, "train-more")
    record = RunDirectory(run).read_manifest().stages["score-train-more"]
    assert any(setting.startswith("ranks.ranks = 2") for setting in record.later_settings)
    assert not any(setting.startswith("num_threads") for setting in record.later_settings)


def test_a_lost_rank_ends_the_command_with_one_sentence(run: Path, complete_run: Path, tmp_path: Path) -> None:
    """Without torchrun itself, which would end the first rank, and whose handler of signals a forked rank has."""
    words = (f"after-part:score-train-more:{tmp_path / 'lost'}", "compare", "--out", run, "--resume", *ADDED)

    def kill(pid: int) -> None:
        wait_until(lambda: is_begun(run, "score-train-more"), "a part", pid)
        job_of_rank = descendants(pid)
        os.kill(pid, signal.SIGKILL)
        assert ended(job_of_rank)
        (tmp_path / "lost").touch()

    answer, lost = warm_ranks_with_one_killed(2, "tests.halts", *words, on_start_of_last=kill)
    assert lost.returncode == -signal.SIGKILL, answer.stderr + lost.stderr
    assert answer.returncode == ExitCode.ENVIRONMENT, answer
    sentences = [line for line in answer.stderr.splitlines() if line.startswith("mismatch-probe: ")]
    assert len(sentences) == 1
    assert "another rank that holds a part of the model is gone" in sentences[0]
    assert "Continue with" in answer.stderr
    probe("compare", "--out", run, "--resume", *ADDED)
    assert leg(run, "train-more") == leg(complete_run, "train-more")
