"""Links, pipes, sockets and devices that a stranger put in a run directory: none is followed, none is opened."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_probe.errors import BrokenRecord, StorageError
from mismatch_probe.records.files import (
    TEMPORARY_PREFIX,
    open_to_append,
    open_to_read,
    read_regular_text,
    replacing,
    require_regular_files,
    write_text,
)
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table, write_table
from mismatch_probe.records.training_run import TrainingDirectory

pytestmark = pytest.mark.timeout(20)


def make_link(path: Path) -> None:
    victim = path.parent.parent / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "nothing")


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() refuses a path of over 107 characters


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("a device needs more rights")


WRITES_HALF = """
import sys
from pathlib import Path
from mismatch_probe.records.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    sys.stdout.write(".")
    sys.stdout.flush()
    sys.stdin.read()
"""
PLANTED = {
    "a symbolic link": make_link,
    "a symbolic link to nothing": make_dangling_link,
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": make_device,
}
planted = pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "f"
    folder.mkdir()
    return folder


def victim_is_whole(folder: Path) -> bool:
    victim = folder.parent / "victim"
    return not (folder.parent / "nothing").exists() and (not victim.exists() or victim.read_text() == "precious")


@planted
@pytest.mark.parametrize("open_it", [open_to_read, open_to_append, read_regular_text, read_table])
def test_it_is_refused_at_once_when_opened(
    folder: Path, plant: Callable[[Path], None], open_it: Callable[[Path], object]
) -> None:
    plant(folder / "x")
    with pytest.raises(BrokenRecord, match=r"x is a (symbolic link|pipe|socket|device)"):
        open_it(folder / "x")
    assert victim_is_whole(folder)


@planted
def test_it_is_refused_when_written_over(folder: Path, plant: Callable[[Path], None]) -> None:
    plant(folder / "report.html")
    with pytest.raises(StorageError, match=r"cannot write .*report\.html is a (symbolic link|pipe|socket|device)"):
        write_text(folder / "report.html", "page")
    with pytest.raises(StorageError, match="cannot write"):
        write_table(folder / "report.html", pa.table({"id": ["a"]}))
    assert victim_is_whole(folder)
    assert [path.name for path in folder.iterdir()] == ["report.html"]


@planted
def test_it_is_found_however_deep_it_lies(folder: Path, plant: Callable[[Path], None]) -> None:
    deep = folder / "checkpoints" / "step-000002" / "model"
    deep.mkdir(parents=True)
    (deep / "config.json").write_text("{}")
    require_regular_files(folder)
    plant(deep / "x")
    with pytest.raises(BrokenRecord, match=r"model/x is a (symbolic link|pipe|socket|device)"):
        require_regular_files(folder)


def test_a_folder_that_is_a_link_is_found_and_not_entered(folder: Path) -> None:
    (folder / "legs").symlink_to("/etc")
    with pytest.raises(BrokenRecord, match="legs is a symbolic link"):
        require_regular_files(folder)


@pytest.mark.slow
def test_folders_that_lie_too_deep_end_in_a_sentence(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(2100):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(BrokenRecord, match="cannot be read"):
        require_regular_files(folder)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_what_a_tracker_links_in_its_own_folder_is_none_of_ours(folder: Path) -> None:
    (folder / "wandb").mkdir()
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    require_regular_files(folder)
    (folder / "parts" / "wandb").mkdir(parents=True)
    (folder / "parts" / "wandb" / "x").symlink_to("y")
    with pytest.raises(BrokenRecord, match="symbolic link"):
        require_regular_files(folder)


def test_a_run_that_is_itself_reached_through_a_link_is_read(tmp_path: Path, folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")
    (tmp_path / "mine").symlink_to(folder)
    mine = RunDirectory(tmp_path / "mine")
    with mine.lock():
        write_text(mine.report_path, "page")
    assert (folder / "report.html").read_text() == "page"
    (folder / "legs").symlink_to(tmp_path)
    with pytest.raises(BrokenRecord, match="symbolic link"), mine.lock():
        pass


def test_lines_are_not_added_to_what_a_link_leads_to(folder: Path) -> None:
    run = TrainingDirectory(folder)
    make_link(run.metrics_path)
    with pytest.raises(BrokenRecord, match="symbolic link"):
        run.append_metrics(1, {"reward/mean": 1.0})
    assert victim_is_whole(folder)


@pytest.mark.parametrize("name", [f"{TEMPORARY_PREFIX}report.html", f"{TEMPORARY_PREFIX}report.html.0"])
def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(folder: Path, name: str) -> None:
    make_link(folder / name)
    write_text(folder / "report.html", "page")
    assert victim_is_whole(folder)
    assert (folder / "report.html").read_text() == "page"


def test_no_two_temporary_files_have_one_name(folder: Path) -> None:
    with replacing(folder / "x") as one, replacing(folder / "x") as other:
        assert one.name != other.name
        one.write(b"first")
        other.write(b"second")
    assert (folder / "x").read_text() == "first"
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_what_another_process_is_writing_stays_and_what_a_killed_one_left_goes(folder: Path) -> None:
    words = [sys.executable, "-c", WRITES_HALF, str(folder / "x")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        write_text(folder / "x", "whole")
        [half] = folder.glob(f"{TEMPORARY_PREFIX}*")
        assert half.read_text() == "half"
        child.kill()
    assert half.exists()
    write_text(folder / "x", "again")
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_a_written_file_has_the_rights_that_the_umask_leaves(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(folder / "x", "text")
    finally:
        os.umask(before)
    assert (folder / "x").stat().st_mode & 0o777 == 0o640
