import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.children.messages import SHARED_MEMORY_VARIABLE, own_token, processes_with
from mismatch_probe.engines.vllm import launch
from mismatch_probe.engines.vllm.arguments import choose_processes, divide_cores
from mismatch_probe.engines.vllm.launch import own_processes
from mismatch_probe.errors import UsageError

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
BESIDE_OTHERS = {"distributed_executor_backend": "external_launcher"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_PROCESS, "")
    monkeypatch.delenv(IN_PROCESS)
    monkeypatch.setenv("WORLD_SIZE", "4")


def chosen(**args: object) -> str | None:
    choose_processes(args)
    return os.environ.get(IN_PROCESS)


def test_a_worker_beside_those_of_torchrun_runs_inside_and_one_of_vllms_own_does_not() -> None:
    assert chosen(tensor_parallel_size=2) is None
    assert chosen(tensor_parallel_size=2, **BESIDE_OTHERS) == "0"


def test_a_lone_worker_runs_inside() -> None:
    assert chosen() == "0"


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 3}, {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}]
)
def test_engines_that_do_not_divide_torchruns_ranks_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"4 ranks cannot be divided among engines over [38] ranks"):
        choose_processes({**sizes, **BESIDE_OTHERS})


def test_engines_that_divide_them_are_not() -> None:
    assert chosen(tensor_parallel_size=2, pipeline_parallel_size=2, **BESIDE_OTHERS) == "0"


def divided(monkeypatch: pytest.MonkeyPatch, cores: set[int], workers: int) -> str | None:
    monkeypatch.setenv(BINDING, "")
    monkeypatch.delenv(BINDING)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    divide_cores({"tensor_parallel_size": workers})
    return os.environ.get(BINDING)


def test_workers_beyond_the_memory_nodes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divided(monkeypatch, {0, 1, 2, 3, 4}, 1) is None
    cores = set(range(256))
    shares = [share.split(",") for share in str(divided(monkeypatch, cores, 100)).split("|")]
    assert len(shares) == 100
    assert sorted(int(core) for share in shares for core in share) == sorted(cores)
    assert {len(share) for share in shares} == {2, 3}
    with pytest.raises(UsageError, match="100 workers cannot share 2 cores"):
        divided(monkeypatch, {0, 1}, 100)


def test_cores_that_are_bound_already_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "0-3|4-7")
    divide_cores({"tensor_parallel_size": 100})
    assert os.environ[BINDING] == "0-3|4-7"


TITLED = "import setproctitle; setproctitle.setproctitle('VLLM::Worker'); print(end='>', flush=True); input()"


@pytest.mark.slow
def test_processes_of_an_engine_are_known_by_their_environment_whatever_they_call_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(launch, "keep_engine", lambda token, files=(): tokens.append(token))
    monkeypatch.delenv(SHARED_MEMORY_VARIABLE, raising=False)
    before = dict(os.environ)
    with own_processes():
        words = [sys.executable, "-c", TITLED]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.read(1) == ">"
    assert os.environ == before
    assert list(processes_with(own_token())) == [Path(f"/proc/{process.pid}")]
    assert tokens == [own_token()] * 2, "before the start, and with what it shares"
    process.communicate("\n")


def test_an_engine_of_a_job_is_ended_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(launch, "keep_engine", lambda token, files=(): tokens.append(token))
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, "of-a-job")
    with own_processes():
        assert os.environ[SHARED_MEMORY_VARIABLE] == "of-a-job"
    assert tokens == []
