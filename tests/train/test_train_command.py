"""`train` with real vLLM and the shipped checkpoint, each run a process of its own."""

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import mismatch_probe
from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.errors import ExitCode
from tests.command_line import probe
from tests.halts import wait_until
from tests.processes import left_memory
from tests.warm_python import warm_python, warm_ranks

pytestmark = pytest.mark.slow

SMALL = (
    *("--model", "demo", "--task", "copy:terms=2", "--num-problems", "32", "--objective", "pg-seq-is"),
    *("--prompts-per-step", "4", "--samples-per-prompt", "4", "--max-new-tokens", "16"),
    *("--learning-rate", "1e-4", "--checkpoint-every", "2"),
)
FP32 = ("--train-dtype", "fp32", "--infer-dtype", "fp32")


def train(*words: object, code: ExitCode = ExitCode.PASS) -> str:
    return warm_python("mismatch_probe", "train", *words, code=code).stderr


def train_on_two_ranks(*words: object) -> None:
    warm_ranks(2, "mismatch_probe", "train", *words)


def train_by_torchrun(*words: object) -> None:
    """By its own program, with ranks forked from it: two new interpreters would import for ten seconds each."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--start-method", "fork", "--run-path")
    warm_python(*torchrun, Path(mismatch_probe.__file__).with_name("__main__.py"), "train", *words)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Of each step, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


def steps_written(run: Path) -> int:
    """Lines that are complete: the one that is being written may be read in part."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("train") / "whole"
    train(*SMALL, "--steps", 4, "--out", run)
    return run


def test_a_run_leaves_metrics_checkpoints_and_a_manifest(complete_run: Path) -> None:
    assert [line["step"] for line in metrics(complete_run)] == [1, 2, 3, 4]
    assert json.loads((complete_run / "manifest.json").read_text())["outcome"] == "finished"
    model = load_file(complete_run / "checkpoints" / "step-000004" / "model" / "model.safetensors")
    start = load_file(DEMO_CHECKPOINT / "model.safetensors")
    assert model.keys() == start.keys()
    assert any((model[name] != start[name].float()).any() for name in start)


def test_a_killed_run_goes_on_as_if_it_had_not_been(complete_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "killed"

    def kill(pid: int) -> None:
        wait_until(lambda: steps_written(run) == 3, "the third step", pid)
        os.kill(pid, signal.SIGKILL)

    words = ("after-step:3", "train", *SMALL, "--steps", 4, "--out", run)
    warm_python("tests.halts", *words, on_start=kill, code=-signal.SIGKILL)
    train("--resume", "--out", run)
    assert metrics(run) == metrics(complete_run)


def test_a_checkpoint_trains_further_as_a_model_of_its_own(complete_run: Path, tmp_path: Path) -> None:
    model = complete_run / "checkpoints" / "step-000004" / "model"
    changed = [word if word != "demo" else str(model) for word in SMALL]
    train(*changed, "--steps", 1, "--out", tmp_path / "further")
    (first,) = metrics(tmp_path / "further")
    assert first["sync/probe_k3"] < 1e-3, "both sides hold the checkpoint's weights"
    assert math.isfinite(first["optim/loss"])


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ranks") / "one"
    train(*SMALL, *FP32, "--steps", 2, "--out", run)
    return run


def test_in_fp32_both_sides_stay_together_after_every_update(one_rank: Path) -> None:
    found = metrics(one_rank)
    assert max(line["mismatch/kl_k3"] for line in found) < 1e-11
    assert max(line["sync/probe_k3"] for line in found) < 1e-11
    assert min(line["update/policy_shift_k3"] for line in found[1:]) > 1e-7


@pytest.mark.parametrize(
    ("start", "engines"),
    [(train_by_torchrun, ()), (train_on_two_ranks, ("--vllm.tensor_parallel_size", 2))],
    ids=["torchrun-with-an-engine-each", "one-engine"],
)
def test_two_ranks_follow_one(
    start: Callable[..., None], engines: tuple[str | int, ...], one_rank: Path, tmp_path: Path
) -> None:
    begun = time.time()
    start(*SMALL, *FP32, *engines, "--steps", 2, "--out", tmp_path / "two")
    assert left_memory(begun) == []
    for one, two in zip(metrics(one_rank), metrics(tmp_path / "two"), strict=True):
        assert two["reward/mean"] == one["reward/mean"]
        assert two["optim/loss"] == pytest.approx(one["optim/loss"], abs=1e-6)
        assert two["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-3)
        for arrived in (one, two):
            assert (arrived["sync/weights_unchanged"], arrived["sync/weights_other"]) == (0, 0)
            assert arrived["sync/weights_compared"] == 1


def test_ranks_take_a_side_to_a_higher_precision_together(tmp_path: Path) -> None:
    raising = ("name = 'raise'", "rule = 'limit'", "metric = 'optim/learning_rate'", "above = 0")
    actions = "actions = ['raise_precision(infer)', 'raise_precision(train)', 'log']"
    (tmp_path / "guards.toml").write_text("\n".join(("[[guard]]", *raising, actions)))
    train_on_two_ranks(*SMALL, "--guards", tmp_path / "guards.toml", "--steps", 3, "--out", tmp_path / "run")
    first, _, last = metrics(tmp_path / "run")
    assert last["mismatch/kl_k3"] < 1e-11 < first["mismatch/kl_k3"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "demo", "--objective", "grpx"), "did you mean 'grpo'"),
        (("--model", "nowhere/at/all"), "does not exist"),
        (("--model", "demo", "--train-dtype", "fp64"), "only a reference"),
        (("--model", "demo", "--reward", "nosuchmodule:f"), "there is no module"),
        (("--model", "demo", "--max-new-tokens", "100000"), "give --max-new-tokens"),
        (("--model", "demo", "--prompts-per-step", "0"), "rollout.prompts"),
        (("--model", "demo", "--guards", "nosuch.toml"), "does not exist"),
        (("--model", "demo", "--task", "sums:nosuch"), "has no split"),
        (("--model", "demo", "--resume"), "--resume needs --out"),
        ((), "no model to train"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    flags: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = probe("train", *flags, code=ExitCode.USAGE).stderr
    assert sentence in output
    assert output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_steps_given_at_a_resume_are_recorded(complete_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "longer"
    shutil.copytree(complete_run, run)
    train("--resume", "--out", run, "--steps", 5)
    assert json.loads((run / "manifest.json").read_text())["settings"]["steps"] == 5
    assert metrics(run)[:4] == metrics(complete_run)


def test_a_resume_with_other_settings_is_refused(complete_run: Path) -> None:
    ended = probe("train", "--resume", "--out", complete_run, "--learning-rate", "1e-3", code=ExitCode.USAGE)
    assert "other settings" in ended.stderr


def test_a_finished_run_is_not_started_over(complete_run: Path) -> None:
    assert "--resume" in probe("train", *SMALL, "--steps", 4, "--out", complete_run, code=ExitCode.USAGE).stderr


def test_a_reward_that_raises_is_named_and_what_was_trained_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def score(prompt, response, answer):\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    output = train(*SMALL, "--reward", "own:score", "--steps", 1, "--out", "run", code=ExitCode.USAGE)
    assert "ZeroDivisionError" in output
    assert "line 2" in output
    assert (tmp_path / "run" / "checkpoints" / "step-000000").is_dir()
