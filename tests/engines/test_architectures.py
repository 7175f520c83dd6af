"""An architecture that is new to vLLM's cache: looked at where it runs, and no folder is left by a kill; and one with
recurrent layers.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.vllm.arguments import check_cpu_states
from mismatch_probe.engines.vllm.launch import ask_in_this_process
from mismatch_probe.errors import StartRefused
from mismatch_probe.verdict.preflight import preflight
from mismatch_probe.verdict.preflight.facts import Sides
from tests.engines.conftest import StartEngine
from tests.tiny_models import FAMILIES, HYBRIDS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WATCHED = ("tempfile.mkdtemp", "subprocess.Popen")
KEEPER = "mismatch_probe.children.server"
"""The process that removes what a killed one leaves; a start that is the process's first begins it."""
seen: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in WATCHED:
        seen.append(f"{event} {arguments[:2]}")


sys.addaudithook(watch)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen.clear()
    monkeypatch.setitem(globals(), "watching", True)
    return seen


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As on a machine where vLLM was never started."""
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    registry._try_inspect_model_cls.cache_clear()
    return tmp_path / "vllm"


def test_the_first_start_makes_no_folder_and_no_process(
    start: StartEngine, llama: Path, empty_cache: Path, events: list[str]
) -> None:
    start(llama)
    assert [path.name for path in empty_cache.glob("modelinfos/*Llama*")], "the architecture was new"
    started = [event for event in events if KEEPER not in event]
    assert [event for event in started if event.startswith("tempfile") or sys.executable in event] == []


def test_what_is_asked_is_answered_here() -> None:
    ask_in_this_process()
    from vllm.model_executor.models import registry

    here = object()
    assert registry._run_in_subprocess(lambda: here) is here


def test_the_format_of_states_is_read_and_their_raw_buffer_is_no_kv_cache(
    start: StartEngine, checkpoint: Callable[[str], Path]
) -> None:
    read_back = start(checkpoint("falcon-h1"), Dtype.BF16).effective_settings()
    assert read_back["kv_cache_dtypes"] == ["bfloat16"]
    assert read_back["state_dtypes"] in (["float32"], ["bfloat16"]), "vLLM keeps FP32 where this CPU has fast kernels"
    findings = preflight(Sides(Dtype.BF16, Dtype.BF16, {"dtype": "bf16"}, read_back))
    accused = [finding.setting for finding in findings if finding.level == "warning"]
    assert accused == (["state_dtypes"] if read_back["state_dtypes"] == ["bfloat16"] else [])


def test_gated_delta_nets_on_a_cpu_are_refused_in_a_format_that_has_no_kernel() -> None:
    check_cpu_states(Dtype.BF16, HYBRIDS["qwen3.5"]())
    check_cpu_states(Dtype.FP32, FAMILIES["llama"]())
    with pytest.raises(StartRefused, match="BF16 alone on a CPU, and not in FP32"):
        check_cpu_states(Dtype.FP32, HYBRIDS["qwen3.5"]())
