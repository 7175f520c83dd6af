"""A command that is killed while it starts, at any of its writes: it goes on with --resume, or is given again."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

import pytest

from mismatch_probe.cli import compare_command, evaluate_command, train_command
from mismatch_probe.cli.app import run
from mismatch_probe.errors import MismatchProbeError
from mismatch_probe.records.kinds import kind_of
from tests.importing.logs import rows, write

_WRITES: Final = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")
_SMALL: Final = {"model": {"path": "demo"}, "sampling": {"max_new_tokens": 8}}
_TASK: Final = {"model": {"path": "demo"}, "task": {"source": "sums:easy", "num_problems": 32}}
_PROMPTS: Final = {"prompts": {"source": "sums:easy", "num_prompts": 4}, "pairs": [["fp32", "fp32"]]}
_COMPARE: Final[dict[str, Any]] = {
    "ranks": None,
    "dry_run": False,
    "gate": None,
    "baseline": None,
    "without_baseline": False,
}


class Began(MismatchProbeError):  # noqa: N818 - no error
    """The start is over: the run is there, and what takes long begins."""


def begins(*_: object, **__: object) -> None:
    raise Began


def compare(out: Path, resume: bool) -> None:
    flags = {} if resume else {**_SMALL, **_PROMPTS}
    compare_command.run_compare(flags, config=None, out=out, resume=resume, json_output=False, **_COMPARE)


def evaluate(out: Path, resume: bool) -> None:
    flags = {} if resume else {**_SMALL, **_PROMPTS}
    evaluate_command.run_evaluate(flags, config=None, out=out, resume=resume, json_output=False)


def train(out: Path, resume: bool) -> None:
    train_command.run_train({} if resume else _TASK, config=None, out=out, resume=resume, json_output=False)


def sanity(out: Path, resume: bool) -> None:
    train_command.run_sanity({} if resume else _TASK, config=None, out=out, resume=resume, json_output=False)


Command = Callable[[Path, bool], None]
COMMANDS: dict[Command, tuple[ModuleType, str, str]] = {
    compare: (compare_command, "execute", "prepare"),
    evaluate: (evaluate_command, "execute_evaluation", "prepare_evaluation"),
    train: (train_command, "execute_training", "prepare_training"),
    sanity: (train_command, "execute_sanity", "prepare_sanity"),
}


@pytest.fixture
def begun_quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command up to where the work begins; what it prepares is prepared once for all starts."""
    command: Command = request.param
    module, work, prepare = COMMANDS[command]
    prepare_anew = getattr(module, prepare)
    prepared: list[object] = []

    def preparing(*arguments: object, **settings: object) -> object:
        if not prepared:
            prepared.append(prepare_anew(*arguments, **settings))
        return prepared[0]

    monkeypatch.setattr(module, work, begins)
    monkeypatch.setattr(module, prepare, preparing)
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
@pytest.mark.parametrize("begun_quickly", COMMANDS, indirect=True, ids=lambda command: command.__name__)
def test_what_is_killed_while_it_starts_goes_on_or_begins_again(begun_quickly: Command, tmp_path: Path) -> None:
    """Killed again while it goes on, it goes on still."""

    def check(out: Path) -> None:
        goes_on = kind_of(out) is not None
        if goes_on:
            assert killed_at(0, out, lambda: begun_quickly(out, True))
        with pytest.raises(Began):
            begun_quickly(out, goes_on)

    whole = tmp_path / "whole"
    moments = distinct_moments(whole, partial(begun_quickly, whole, False))
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

    whole = tmp_path / "whole"
    moments = distinct_moments(whole, partial(imports, whole))
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
            train(folder, False)
        assert all((folder / name).read_text() == "mine" for name in names)
