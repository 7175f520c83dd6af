"""Checkpoints of strangers: no code in one is run, nothing outside is read, and each is refused in a sentence."""

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mismatch_probe.errors import BrokenRecord
from tests.train.quick_runs import quick_home, quick_settings, train

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]


class TouchesFile:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield quick_home(tmp_path_factory.mktemp("home"), patch)


@pytest.fixture(scope="module")
def trained(home: Path, llama: Path) -> Path:
    """A run that each test gets a copy of."""
    train(home / "trained", quick_settings(llama, home, 2))
    return home / "trained"


@pytest.fixture
def state(home: Path, trained: Path) -> Path:
    """Of the newest checkpoint of a run."""
    shutil.rmtree(home / "run", ignore_errors=True)
    return Path(shutil.copytree(trained, home / "run")) / "checkpoints" / "step-000002" / "state"


def resume(home: Path, llama: Path) -> None:
    train(home / "run", quick_settings(llama, home, 4), resume=True)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_planted_pickle_would_run_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(TouchesFile(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__0.metadata"])
def test_a_pickle_in_the_state_is_refused_and_not_run(home: Path, llama: Path, state: Path, name: str) -> None:
    (state / name).write_bytes(pickle.dumps(TouchesFile(home / "ran")))
    with pytest.raises(BrokenRecord, match=r"step-000002 .*is not read: .*--model .*step-000002/model and another"):
        resume(home, llama)
    assert not (home / "ran").exists()


def test_a_state_of_the_earlier_format_is_refused_and_not_run(home: Path, llama: Path, state: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    shutil.rmtree(state)
    with pytest.warns(UserWarning, match="torch.distributed"):
        save({"policy": {"x": torch.zeros(2), "lr": TouchesFile(home / "ran")}}, checkpoint_id=state, no_dist=True)
    (state / ".metadata").write_bytes(pickle.dumps(TouchesFile(home / "ran")))
    with pytest.raises(BrokenRecord, match="in the format of an earlier version"):
        resume(home, llama)
    assert not (home / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_under_the_name_of_a_tensor_file_is_refused_and_not_run(
    home: Path, llama: Path, state: Path, kind: str
) -> None:
    for file in state.iterdir():
        if kind == "pickle":
            file.write_bytes(pickle.dumps(TouchesFile(home / "ran")))
        else:
            torch.save(TouchesFile(home / "ran"), file)
    with pytest.raises(BrokenRecord, match=r"step-000002 cannot be read .*remove it"):
        resume(home, llama)
    assert not (home / "ran").exists()


def test_no_file_of_a_run_is_a_pickle(home: Path, state: Path) -> None:
    assert len(files_of(home / "run")) > 5
    for path in files_of(home / "run"):
        start = path.read_bytes()[:2]
        assert start[:1] != b"\x80", path
        assert start != b"PK", path
        assert path.suffix in (".safetensors", ".json", ".jsonl", ".jinja", ".lock", ".txt", ""), path


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")], ids=["pipe", "link"])
@pytest.mark.parametrize("name", ["state/a.safetensors", "model/pytorch_model.bin", "trainer.json"])
def test_what_is_no_file_keeps_nobody_waiting(
    home: Path, llama: Path, state: Path, name: str, plant: Callable[[Path], None]
) -> None:
    path = state.parent / name
    path.unlink(missing_ok=True)
    plant(path)
    with pytest.raises(BrokenRecord, match=r"is a (pipe|symbolic link)"):
        resume(home, llama)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "renamed_tensor"])
def test_a_damaged_tensor_file_is_a_sentence(home: Path, llama: Path, state: Path, damage: str) -> None:
    file = max(state.iterdir(), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    if damage == "removed":
        file.unlink()
    elif damage == "renamed_tensor":
        file.write_bytes(content.replace(b"policy.", b"police."))
    else:
        file.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    with pytest.raises(BrokenRecord, match=r"step-000002 cannot be read .*remove it"):
        resume(home, llama)


@pytest.mark.slow
def test_weights_larger_than_a_file_holds_go_to_several(
    home: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_run = train(home / "whole", quick_settings(llama, home, 4))
    monkeypatch.setattr("mismatch_probe.train.checkpoints._FILE_BYTES", 100_000)
    train(home / "several", quick_settings(llama, home, 2))
    assert len(list((home / "several" / "checkpoints" / "step-000002" / "state").iterdir())) > 2
    assert train(home / "several", quick_settings(llama, home, 4), resume=True) == complete_run
