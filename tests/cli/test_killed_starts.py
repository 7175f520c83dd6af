"""A command that is killed while it starts, at any of its writes: it goes on with --resume, or is given again."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

from mismatch_probe.__main__ import run
from mismatch_probe.cli.compare import compare
from mismatch_probe.cli.evaluate import evaluate
from mismatch_probe.cli.train import sanity, train
from mismatch_probe.errors import ExitCode, MismatchProbeError
from mismatch_probe.records.files import kind_of
from tests.importing.logs import rows, write
from tests.settings_calls import call

_WRITES: Final = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")
_SMALL: Final = {"model": {"path": "demo"}, "sampling": {"max_new_tokens": 8}}
_TASK: Final = {"model": {"path": "demo"}, "task": {"source": "sums:easy", "num_problems": 32}}
_PROMPTS: Final = {"prompts": {"source": "sums:easy", "num_prompts": 4}, "pairs": [["fp32", "fp32"]]}


class Began(MismatchProbeError):  # noqa: N818 - no error
    """The start is over: the run is there, and what takes long begins."""


def begins(*_: object, **__: object) -> None:
    raise Began


@dataclass(frozen=True)
class Command:
    """A command on the settings that it starts from, and where its preparation and its work are."""

    command: Callable[..., ExitCode]
    settings: Mapping[str, Any]
    prepare: str
    work: str

    def __call__(self, out: Path, resume: bool) -> None:
        call(self.command, {} if resume else self.settings, out=out, resume=resume)


COMMANDS: Final = (
    Command(compare, {**_SMALL, **_PROMPTS}, "compare.preparation.prepare", "compare.run.execute"),
    Command(evaluate, {**_SMALL, **_PROMPTS}, "evaluate.run.prepare_evaluation", "evaluate.run.execute_evaluation"),
    Command(train, _TASK, "train.preparation.prepare_training", "train.run.execute_training"),
    Command(sanity, _TASK, "train.sanity.prepare_sanity", "train.sanity.execute_sanity"),
)


@pytest.fixture
def begun_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command up to where the work begins; what it prepares is prepared once for all starts."""
    command: Command = request.param
    module, _, prepare = f"mismatch_probe.{command.prepare}".rpartition(".")
    prepare_anew = getattr(import_module(module), prepare)
    prepared: list[object] = []

    def preparing(*arguments: object, **settings: object) -> object:
        if not prepared:
            prepared.append(prepare_anew(*arguments, **settings))
        return prepared[0]

    monkeypatch.setattr(f"mismatch_probe.{command.work}", begins)
    monkeypatch.setattr(f"{module}.{prepare}", preparing)
    monkeypatch.setattr("mismatch_probe.children.servers.warm_up", lambda *_: None)
    with TemporaryDirectory() as folder, pytest.raises(Began):
        command(Path(folder) / "run", False)
    return command


def distinct_moments(folder: Path, work: Callable[[], object]) -> list[int]:
    """The writes below `folder`, by their number, before which it holds what it held before none earlier."""
    record = folder.with_suffix(".states")

    def keep(moment: int) -> None:
        held = sorted((str(path), path.stat().st_size if path.is_file() else 0) for path in folder.rglob("*"))
        with record.open("a") as states:
            states.write(f"{folder.exists()} {held}\n")

    _forked(folder, work, keep)
    states = record.read_text().splitlines()
    return sorted({state: moment for moment, state in reversed(list(enumerate(states)))}.values())


def killed_at(moment: int, folder: Path, work: Callable[[], object]) -> bool:
    """Whether a fork that does `work` was killed, before its write of this number below `folder`."""

    def kill(now: int) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    return os.WIFSIGNALED(_forked(folder, work, kill))


def _forked(folder: Path, work: Callable[[], object], before_write: Callable[[int], None]) -> int:
    """How a fork that does `work` ended."""
    child = os.fork()
    if not child:
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            writes = event in _WRITES or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if writes and isinstance(arguments[0], str | os.PathLike):
                path = Path(arguments[0])
                if path == folder or folder in path.parents:
                    count += 1
                    before_write(count - 1)

        sys.addaudithook(watch)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.slow
@pytest.mark.parametrize("begun_quickly", COMMANDS, indirect=True, ids=lambda command: command.command.__name__)
def test_what_is_killed_while_it_starts_goes_on_or_begins_again(begun_quickly: Command, tmp_path: Path) -> None:
    """Killed again while it goes on, it goes on still."""

    def check(out: Path) -> None:
        goes_on = kind_of(out) is not None
        if goes_on:
            assert killed_at(0, out, lambda: begun_quickly(out, True))
        with pytest.raises(Began):
            begun_quickly(out, goes_on)

    complete_run = tmp_path / "whole"
    moments = distinct_moments(complete_run, partial(begun_quickly, complete_run, False))
    assert len(moments) > 3
    for moment in moments:
        out = tmp_path / f"run-{moment}"
        assert killed_at(moment, out, partial(begun_quickly, out, False))
        check(out)


@pytest.mark.slow
def test_an_import_that_is_killed_begins_again_or_says_how_it_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.jsonl", rows())

    def imports(out: Path) -> int:
        return run(["import", str(log), "--out", str(out)])

    def check(out: Path) -> None:
        capsys.readouterr()
        if kind_of(out) is None:
            assert imports(out) == 0, capsys.readouterr().err
            return
        if (out / "summary.json").exists():
            return
        assert imports(out) == 2
        assert f"report {out} --recompute" in " ".join(capsys.readouterr().err.split())
        assert run(["report", str(out), "--recompute"]) == 0

    complete_run = tmp_path / "whole"
    moments = distinct_moments(complete_run, partial(imports, complete_run))
    assert len(moments) > 10
    for moment in moments:
        out = tmp_path / f"run-{moment}"
        assert killed_at(moment, out, partial(imports, out))
        check(out)


@pytest.mark.slow
def test_what_somebody_else_keeps_in_a_folder_is_not_taken_for_a_start(tmp_path: Path) -> None:
    """Files of a run's names where no start was killed, and other files where one was."""
    for number, names in enumerate(([".lock", "prompts.parquet"], [".lock", ".writing-run", "notes.md"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).write_text("mine")
        with pytest.raises(MismatchProbeError, match="is not empty: give another --out"):
            call(train, _TASK, out=folder)
        assert all((folder / name).read_text() == "mine" for name in names)
