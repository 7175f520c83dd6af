"""A checkpoint that the disk refuses is a sentence, and leaves those before it."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.errors import StorageError
from tests.train.quick_runs import quick_home, quick_settings, recorded, train

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return quick_home(tmp_path, monkeypatch)


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
def test_weights_and_moments_that_do_not_fit_are_a_sentence(llama: Path, home: Path) -> None:
    train(home / "run", quick_settings(llama, home, 2))
    with no_file_above(150_000), pytest.raises(StorageError, match=r"cannot write .*step-000004.* give .*--out"):
        train(home / "run", quick_settings(llama, home, 4), resume=True)
    checkpoints = home / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step-000000", "step-000002"}
    assert len(recorded(home / "run")) == 4
    assert len(train(home / "run", quick_settings(llama, home, 4), resume=True)) == 4


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_a_sentence(llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_out(*_: Any, **__: Any) -> None:
        """The larger file before it."""

    monkeypatch.setattr("mismatch_probe.train.checkpoints.write_tensors", leave_out)
    with no_file_above(150_000), pytest.raises(StorageError, match=r"cannot write .*step-000000.* give .*--out"):
        train(home / "run", quick_settings(llama, home, 2))
    assert not list((home / "run" / "checkpoints").iterdir())
