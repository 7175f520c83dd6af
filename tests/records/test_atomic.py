import errno
import os
from pathlib import Path

import pytest

from mismatch_probe.errors import StorageError
from mismatch_probe.records.files import TEMPORARY_PREFIX, replacing, storage_errors, write_text


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    write_text(path, "old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"ha")
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert not list(tmp_path.glob(f"{TEMPORARY_PREFIX}*"))


def test_a_folder_that_is_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        write_text(tmp_path / "file" / "below", "text")


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission")]
)
def test_what_the_disk_refuses_names_the_path_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=f"document.json: .*{words}.*--out"):
        write_text(tmp_path / "document.json", "text")
    assert not (tmp_path / "document.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_really_full_device_is_a_storage_error() -> None:
    def fill() -> None:
        with storage_errors(Path("run")), Path("/dev/full").open("wb", buffering=0) as device:
            device.write(b"x")

    with pytest.raises(StorageError, match="disk is full"):
        fill()


def test_lone_surrogates_of_hostile_text_are_escaped_not_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "t", "a\ud800b")
    assert (tmp_path / "t").read_text() == "a\\ud800b"
