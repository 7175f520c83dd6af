import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_probe.engines.vllm.failures import engine_failure
from mismatch_probe.errors import EngineError, OutOfMemory, StartRefused, UsageError


def failure(message, cause=None):
    error = RuntimeError(message)
    error.__cause__ = cause
    return engine_failure(error, "some/model", "starting")


def test_an_unsupported_architecture_is_named():
    error = failure("Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: ...")
    assert isinstance(error, EngineError)
    assert "does not support the architecture FooForCausalLM;" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        "To serve at least one request with the models's max seq len (512), (0.5 GiB KV cache is needed, which",
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "CUDA out of memory. Tried to allocate 20.00 GiB",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization (0.92)",
    ],
)
def test_lack_of_memory_names_the_flags_that_mend_it(message):
    error = failure(message)
    assert isinstance(error, OutOfMemory)
    for flag in ("--vllm.gpu_memory_utilization", "--vllm.max_model_len", "VLLM_CPU_KVCACHE_SPACE"):
        assert flag in str(error)


def test_broken_safetensors_name_the_checkpoint():
    error = failure("SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered")
    assert isinstance(error, UsageError)
    assert "'some/model'" in str(error)
    assert "broken safetensors" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        "Following weights were not initialized from checkpoint: {'model.layers.0.mlp.weight'}",
        "start (0) + length (128) exceeds dimension size (64).",
        "Attempted to load weight (torch.Size([64, 32])) into parameter (torch.Size([64, 64]))",
    ],
)
def test_weights_that_do_not_fit_the_config_name_the_checkpoint(message):
    error = failure(message)
    assert isinstance(error, UsageError)
    assert "the weights of 'some/model' do not match its config.json" in str(error)
    assert message.rstrip(".") in str(error)


def test_a_context_that_is_too_short_names_the_flags():
    error = failure("User-specified max_model_len (9000) is greater than the derived max_model_len (2048)")
    assert isinstance(error, UsageError)
    assert "--max-new-tokens" in str(error)


def test_the_root_cause_decides_not_the_error_wrapped_around_it():
    error = failure("Engine core initialization failed. See root cause above.", MemoryError("CUDA out of memory"))
    assert isinstance(error, OutOfMemory)


def test_a_failure_of_another_process_points_to_the_log():
    error = failure("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    assert isinstance(error, EngineError)
    assert "log above" in str(error)


EARLIER = """(EngineCore pid=1) INFO 01-01 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(EngineCore pid=1) ERROR 01-01 [core.py:2] ValueError: an earlier start
"""
LATER = """(EngineCore pid=2) INFO 01-01 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(EngineCore pid=2) ERROR 01-01 [core.py:2] EngineCore failed to start.
(EngineCore pid=2) ERROR 01-01 [core.py:2] Traceback (most recent call last):
(Worker_TP1 pid=3) ERROR 01-01 [core.py:2] {reason}
(EngineCore pid=2) ERROR 01-01 [core.py:2] Exception: WorkerProc initialization failed
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("AssertionError: Not enough NUMA nodes", "EngineError", "vLLM's own process failed: Not enough NUMA nodes"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", "OutOfMemory", "--vllm.gpu_memory_utilization"),
    ],
)
def test_what_another_process_wrote_to_the_log_is_the_reason(
    tmp_path: Path, reason: str, kind: str, words: str
) -> None:
    code = (
        "import sys\n"
        "from mismatch_probe.engines.vllm.failures import engine_failure\n"
        "sys.stderr.write(sys.argv[1])\n"
        "sys.stderr.flush()\n"
        "found = engine_failure(RuntimeError('Engine core initialization failed. See'), 'some/model', 'starting')\n"
        "print(type(found).__name__, found)\n"
    )
    with (tmp_path / "engine.log").open("w") as log:
        answer = subprocess.run(
            [sys.executable, "-c", code, EARLIER + LATER.format(reason=reason)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=True,
        )
    assert answer.stdout.startswith(kind)
    assert words in answer.stdout
    assert "earlier" not in answer.stdout


def test_anything_else_keeps_the_last_meaningful_line_of_the_root_cause():
    error = failure("wrapped", ValueError("first line\nthe reason\n"))
    assert type(error) is StartRefused
    assert str(error) == "vLLM failed while starting 'some/model': the reason"


def test_an_error_of_the_probe_itself_passes_unchanged():
    error = UsageError("as it is")
    assert engine_failure(error, "some/model", "starting") is error
