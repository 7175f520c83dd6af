"""Ctrl-C ends training as an interruption, also where a library makes another error of it."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli.process import interrupts_kept
from mismatch_probe.cli.train import sanity, train
from tests.settings_calls import call

FLAGS = {"model": {"path": "demo"}, "task": {"source": "sums:easy", "num_problems": 32}}


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """A shell starts background jobs deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def loading(*_: Any, interrupted: bool = True, **__: Any) -> None:
    """A library that makes an error of its own of whatever reaches it."""
    try:
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        raise ValueError
    except BaseException as error:
        raise RuntimeError("it could not be loaded") from error


def test_an_interruption_that_became_an_error_is_one() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        loading()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_without_an_interruption_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="could not be loaded"), interrupts_kept():
        loading(interrupted=False)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("run", [train, sanity])
def test_a_start_that_is_interrupted_is_told_how_to_go_on(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mismatch_probe.train.parts.start_engine", loading)
    with pytest.raises(KeyboardInterrupt):
        call(run, FLAGS, out=tmp_path / "run")
    assert "--resume --out" in capfd.readouterr().err
