"""An architecture that is new to vLLM's cache: looked at where it runs, and no folder is left by a kill."""

import sys
from pathlib import Path

import pytest

from mismatch_probe.engines.vllm.launch import ask_in_this_process
from tests.engines.conftest import StartEngine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WATCHED = ("tempfile.mkdtemp", "subprocess.Popen")
seen: list[str] = []
watching = False


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in WATCHED:
        seen.append(f"{event} {arguments[0]}")


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
    assert [event for event in events if event.startswith("tempfile") or sys.executable in event] == []


def test_what_is_asked_is_answered_here() -> None:
    ask_in_this_process()
    from vllm.model_executor.models import registry

    here = object()
    assert registry._run_in_subprocess(lambda: here) is here
