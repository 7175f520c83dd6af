import os

import pytest

from mismatch_probe.engines.vllm.environment import choose_processes
from mismatch_probe.errors import UsageError

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
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
