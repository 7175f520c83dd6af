"""What a pytest worker prepares once, and which of its tests run first."""

import atexit
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import hypothesis
import pytest

from mismatch_probe.children import servers
from mismatch_probe.children.servers import close_servers
from mismatch_probe.host import prepare_process
from tests import unsynced
from tests.cores import keep_to_own_cores
from tests.environment import environment_as_it_was
from tests.gate.cli import CommandLine
from tests.processes import left_memory

if TYPE_CHECKING:
    from tests.report.browser import Tab

ROOT = Path(__file__).parents[1]

os.environ.pop("OMP_NUM_THREADS", None)
"""A run goes on with as many threads as it was begun with: what the shell says of them would be refused."""
keep_to_own_cores()
prepare_process()
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""nohup and a job in the background have them ignored, and what commands do at them is tested."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""A server that is started in another folder finds the tests' own jobs."""
servers.STAGES["training"].insert(0, unsynced.__name__)
servers.STAGES["training"].append("transformers.models.llama.modeling_llama")
servers.STAGES["engine"] += ["tests.ready_commands", "tests.ready_to_train"]
"""Whole commands are forked from that server too (`tests/warm_python.py`)."""
gc.disable()
gc.set_threshold(20_000, 20, 20)
"""Python's own would look at the tests' own objects every 700, a thirteenth of the processor time of fast tests."""
atexit.register(gc.unfreeze)
"""Or nanobind complains of what was never freed; thawed sooner, pytest's last collections would look at all of it."""
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
"""How long an example takes is the machine's."""


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made once."""

    @cache
    def folder(family: str) -> Path:
        from tests.tiny_models import make_checkpoint

        return make_checkpoint(tmp_path_factory.mktemp(family) / family, family)

    return folder


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[[str], Path]) -> Path:
    """Where nothing else is said, the tiny model that a test takes."""
    return checkpoint("llama")


@pytest.fixture(scope="session")
def adapter(llama: Path) -> Path:
    """Of `llama`."""
    from tests.adapters import make_adapter

    return make_adapter(llama.parent / "adapter", llama)


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """The address of the page of a real browser, which knows plotly.js compiled once it has drawn with it."""
    from tests.report.browser import running_browser

    with running_browser() as page:
        yield page


@pytest.fixture(scope="module")
def tab(browser: str) -> Iterator["Tab"]:
    """The browser's page, empty."""
    from tests.report.browser import steered

    with steered(browser) as tab:
        yield tab


@pytest.fixture(scope="module", autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """An engine in this process replaces functions of torch and sets variables: the next module gets them as they were.

    torch computes on one thread: tensors are tiny here, and other workers need the other processors.
    """
    import torch

    torch.set_num_threads(1)

    set_num_threads = torch.set_num_threads
    accelerator = torch.accelerator.synchronize, torch.accelerator.empty_cache
    with environment_as_it_was():
        yield
    torch.set_num_threads = set_num_threads
    torch.accelerator.synchronize, torch.accelerator.empty_cache = accelerator
    if len(gc.get_objects()) > _MANY_OBJECTS:
        _freeze_what_stays()


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    with environment_as_it_was():
        yield


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


LONGEST: Final = (
    *("test_training_faults", "test_server_end_to_end", "test_train_command", "test_distributions"),
    *("test_ranks_end_to_end", "test_over_ranks", "test_killed", "test_compare", "test_lines_as_written"),
)
"""Files of more than twenty seconds of processor time, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, then all with slow tests, then those with the most fast ones: no worker is left
    with a long one when the others have ended.
    """
    slow = {item.path for item in items if is_slow(item)}
    num_fast = Counter(item.path for item in items if item.path not in slow)
    turns = {stem: turn for turn, stem in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (turns.get(item.path.stem, len(turns)), item.path not in slow, -num_fast.get(item.path, 0))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.workers import TogetherScheduling

    return TogetherScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where no test is slow no job starts an engine, and the servers import none."""
    gc.enable()
    _freeze_what_stays()
    if not any(map(is_slow, session.items)):
        servers.STAGES["engine"] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup() -> None:
    """vLLM is imported by the first test that starts an engine in this process, or by a fixture of it."""
    if len(sys.modules) > _num_frozen_modules + _MANY_MODULES:
        _freeze_what_stays()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_START] = time.time()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The session fails where its processes have ended and named memory of theirs is left."""
    if hasattr(session.config, "workerinput"):
        return
    close_servers()
    left = left_memory(session.config.stash[_START])
    if left:
        time.sleep(_LEAVING_SECONDS)
        left = sorted({*left} & {*left_memory(session.config.stash[_START])})
    if left:
        session.config.stash[_LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left in /dev/shm, and no process has it mapped", red=True)
        terminalreporter.write_line("\n".join(left))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """A failure shows what the commands and jobs of the test wrote into its folder, which is gone where CI runs."""
    report: Any = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for file in sorted({*folder.rglob("stderr"), *folder.rglob("logs/*.log")}):
            report.sections.append((f"the end of {file}", file.read_text(errors="replace")[-_SHOWN_CHARACTERS:]))
    return report


_START: Final = pytest.StashKey[float]()
_LEFT: Final = pytest.StashKey[list[str]]()
_SHOWN_CHARACTERS: Final = 4000
_LEAVING_SECONDS: Final = 5.0
_MANY_MODULES: Final = 50
_MANY_OBJECTS: Final = 20_000
_num_frozen_modules = 0


def _freeze_what_stays() -> None:
    """Leave what imports made, a million objects, and what a file of tests left out of the collections to come.

    Closed scorers and engines ask for one each.
    """
    global _num_frozen_modules
    gc.collect()
    gc.freeze()
    _num_frozen_modules = len(sys.modules)
