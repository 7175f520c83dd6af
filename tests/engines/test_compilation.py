"""Whether vLLM compiles, before it is started."""

import os
from typing import Any

import pytest

from mismatch_probe.engines.vllm.declared import compilation_defaults, prepare_compilation


def test_on_a_cpu_the_engine_runs_eagerly_where_nothing_is_said() -> None:
    assert compilation_defaults({"max_num_seqs": 8}, on_cpu=True) == {"enforce_eager": True}


@pytest.mark.parametrize(
    "args",
    [
        {"enforce_eager": False},
        {"enforce_eager": True},
        {"compilation_config": {"mode": 3}},
        {"optimization_level": 2},
        {"max_cudagraph_capture_size": 8},
    ],
)
def test_what_a_user_says_of_compilation_stays(args: dict[str, Any]) -> None:
    assert compilation_defaults(args, on_cpu=True) == {}


def test_on_a_gpu_the_users_engine_stays_as_it_is() -> None:
    assert compilation_defaults({}, on_cpu=False) == {}


def test_a_compiled_engine_on_a_cpu_loads_what_an_earlier_start_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "")
    del os.environ["VLLM_USE_AOT_COMPILE"]
    prepare_compilation(on_cpu=False)
    assert "VLLM_USE_AOT_COMPILE" not in os.environ
    prepare_compilation(on_cpu=True)
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "0"
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    prepare_compilation(on_cpu=True)
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"
