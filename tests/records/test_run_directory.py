import json
from pathlib import Path
from threading import Event, Thread
from time import sleep

import pytest

from mismatch_probe.errors import BrokenRecord, RunDirectoryError, StorageError
from mismatch_probe.records.run_directory import RunDirectory
from tests.simulated_run import Simulation, edit_manifest, simulated_run


def make(run: RunDirectory) -> None:
    with run.create():
        pass


def test_a_directory_with_something_in_it_is_never_reused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match=r"not empty.*another --out"):
        make(RunDirectory(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_that_holds_a_run_says_how_to_continue(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="--resume"):
        make(RunDirectory(tmp_path))


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    make(RunDirectory(tmp_path / "run"))
    make(RunDirectory(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_what_a_kill_at_the_first_write_left_does_not_bar_the_directory(tmp_path: Path) -> None:
    (tmp_path / ".writing-manifest.json").write_text("{")
    run = RunDirectory(tmp_path)
    make(run)
    assert not run.is_run


def test_locking_what_is_no_run_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"), RunDirectory(tmp_path / "none").lock():
        pass
    assert not (tmp_path / "none").exists()


def test_a_path_below_a_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, RunDirectoryError), match=r"cannot write|not empty"):
        make(RunDirectory(tmp_path / "file" / "run"))


def test_two_writers_cannot_hold_one_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.manifest_path.write_text("{}")
    with run.lock(), pytest.raises(RunDirectoryError, match="another process"), RunDirectory(tmp_path).lock():
        pass
    with run.lock():
        pass


def test_reading_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory(tmp_path).read_manifest()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory(tmp_path).read_summary()


def test_a_run_without_a_summary_names_the_command_that_makes_one(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2))
    with pytest.raises(RunDirectoryError, match=r"every leg is recorded.*`mismatch-probe report .*run --recompute`"):
        run.read_summary()
    edit_manifest(run, lambda manifest: manifest.growing.update(manifest.stages))
    with pytest.raises(RunDirectoryError, match=r"unfinished.*--resume"):
        run.read_summary()
    edit_manifest(
        run,
        lambda manifest: (manifest.growing.clear(), setattr(next(iter(manifest.stages.values())), "state", "running")),
    )
    with pytest.raises(RunDirectoryError, match=r"unfinished.*--resume"):
        run.read_summary()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"schema_version": 99}), json.dumps({"schema_version": 1, "model": 3})]
)
def test_a_damaged_summary_or_one_of_another_version_is_not_believed(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text('{"manifest_version": 1}')
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(BrokenRecord, match="--recompute"):
        RunDirectory(tmp_path).read_summary()


@pytest.mark.parametrize("reached", ["by its name", "through a link", "as the working directory"])
def test_a_run_without_results_goes_however_its_folder_is_reached(
    reached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    path = {"by its name": folder, "through a link": link, "as the working directory": Path()}[reached]
    run = RunDirectory(path)
    with run.create():
        run.log_path("compare").parent.mkdir()
        run.log_path("compare").touch()
    run.discard_without_results()
    run.require_free()
    assert not folder.exists() or not list(folder.iterdir())


def test_a_name_is_held_by_one_process_while_the_run_stays_free_for_others(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=1))
    other = RunDirectory(run.path)
    with run.reserve("localize-bf16-bf16.json"):
        taken = pytest.raises(RunDirectoryError, match=r"localize-bf16-bf16\.json is being made by another process")
        with taken, other.reserve("localize-bf16-bf16.json"):
            pass
        with other.reserve("localize-fp16-fp16.json"), other.lock():
            pass
    with other.reserve("localize-bf16-bf16.json"):
        pass


@pytest.mark.slow
def test_who_is_writing_a_run_is_waited_for_where_that_is_asked(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=1))
    writes, written = Event(), []

    def write() -> None:
        with RunDirectory(run.path).lock():
            writes.set()
            sleep(0.3)
            written.append("by the other")

    other = Thread(target=write)
    other.start()
    writes.wait()
    with pytest.raises(RunDirectoryError, match="is being written by another process"), run.lock():
        pass
    with run.lock(wait_seconds=60):
        assert written == ["by the other"]
    other.join()
