"""A job in a process of its own: what it says, gives and raises comes back, and nothing of it stays."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.children import servers
from mismatch_probe.children.job import JobRequest, function_of, name_of
from mismatch_probe.children.messages import FAILURE, as_exception, describe_error, read
from mismatch_probe.children.servers import Preload
from mismatch_probe.children.start import Job, result_of, run, run_each
from mismatch_probe.errors import EngineError, OutOfMemory, RunDirectoryError, StorageError, UsageError
from tests.children import jobs
from tests.halts import wait_until
from tests.processes import ended


def job(function: str, *arguments: Any, log: Path | None = None, preload: Preload = "engine") -> Job:
    return Job("the job", getattr(jobs, function), arguments, preload, "lower --num-prompts", log)


def test_a_function_is_found_by_its_name() -> None:
    assert name_of(jobs.counts) == "tests.children.jobs:counts"
    assert function_of("tests.children.jobs:counts") is jobs.counts


def test_a_function_of_a_program_is_named_by_the_module_that_other_processes_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", jobs)
    monkeypatch.setattr(jobs.counts, "__module__", "__main__")
    assert name_of(jobs.counts) == "tests.children.jobs:counts"


@pytest.mark.slow
def test_messages_come_in_order_then_the_result_and_prints_go_to_the_log(tmp_path: Path) -> None:
    heard: list[Any] = []
    log = tmp_path / "logs" / "job.log"
    assert run(job("counts", 3, log=log), heard.append) == {"sum": 3}
    assert heard == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert log.read_text() == "{noise}\n"


@pytest.mark.slow
def test_of_several_jobs_so_many_run_at_once_and_one_that_fails_keeps_no_other_from_running() -> None:
    words = ["counts", "refuses", "counts", "counts"]
    running: set[int] = set()
    most_running: list[int] = []
    places: list[int] = []
    ends: dict[int, Any] = {}

    def start_job(number: int, place: int) -> Job:
        running.add(number)
        most_running.append(len(running))
        places.append(place)
        return job(words[number], number if words[number] == "counts" else "not a run")

    def end_job(number: int, result: Any, failure: Exception | None) -> None:
        running.remove(number)
        ends[number] = failure or result

    run_each(start_job, len(words), 2, lambda number, message: None, end_job)
    assert max(most_running) == 2
    assert set(places) == {0, 1}
    assert [ends[number] for number in (0, 2, 3)] == [{"sum": sum(range(number))} for number in (0, 2, 3)]
    assert isinstance(ends[1], RunDirectoryError)


def test_a_failure_comes_back_as_the_same_error() -> None:
    with pytest.raises(RunDirectoryError) as refused:
        run(job("refuses", "not a run"))
    assert str(refused.value) == "not a run"
    assert "in refuses" in "".join(refused.value.__notes__), "for --debug"


def test_a_failure_of_a_kind_that_a_room_keeps_to_itself_is_told_as_what_it_is_a_kind_of() -> None:
    class KeyMissingError(UsageError):
        pass

    raised = as_exception(describe_error(KeyMissingError("a key is missing"), "the job"))
    assert type(raised) is UsageError
    assert str(raised) == "a key is missing"


def test_an_error_that_nobody_expected_is_one_line_and_the_log_has_the_rest(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the job failed unexpectedly: KeyError"):
        run(job("stumbles", log=tmp_path / "log"))
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_failure_is_told_although_the_log_cannot_be_written() -> None:
    reading, writing = os.pipe()
    request = JobRequest("the job", "tests.children.jobs:refuses", ("not a run",), {}, str(Path.cwd()))
    words = [sys.executable, "-m", "mismatch_probe.children.job", request.to_json(), str(writing)]
    with Path("/dev/full").open("w") as full:
        child = subprocess.Popen(words, stdout=full, stderr=full, pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading) as messages:
        answer = [read(line) for line in messages]
    assert child.wait() == 1
    assert [(kind, content["error"], content["message"]) for kind, content in answer] == [
        (FAILURE, "RunDirectoryError", "not a run")
    ]


def test_a_log_that_cannot_be_made_is_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(StorageError, match="logs"):
        run(job("counts", 1, log=tmp_path / "logs" / "log"))


def test_a_job_that_dies_without_a_word_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the job ended with exit code 7: illegal instruction \(whole log"):
        run(job("gives_up", log=tmp_path / "log"))
    with pytest.raises(EngineError, match=r"exit code 7: illegal instruction; see `mismatch-probe doctor`$"):
        run(job("gives_up"))


def test_a_job_that_exits_says_why() -> None:
    with pytest.raises(EngineError, match=r"the job ended with exit code 1: .*libcudart"):
        run(job("exits"))


def test_a_job_that_the_system_killed_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match="want of memory: lower --num-prompts"):
        run(job("is_killed"))


def test_where_a_job_crashed_stands_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"ended with signal SIGSEGV: about to \(whole log: "):
        run(job("crashes", log=tmp_path / "log"))
    log = (tmp_path / "log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in crashes" in log


def test_what_a_killed_job_leaves_running_ends_with_it_and_holds_nobody_up(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(OutOfMemory):
        run(job("leaves_a_process", str(tmp_path / "survived")))
    assert time.monotonic() - begun < 30
    assert not (tmp_path / "survived").exists()


def test_an_interrupt_ends_the_job_and_what_it_started_before_it_is_passed_on() -> None:
    heard: list[int] = []

    def interrupt(pids: list[int]) -> None:
        heard.extend(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job("sleeps"), interrupt)
    assert len(heard) == 2
    assert ended(heard)


def test_a_job_runs_beside_the_body_and_ends_with_it() -> None:
    heard: list[int] = []
    with result_of(job("counts", 2)) as result:
        pass
    with result_of(job("counts", 2)) as result:
        assert result() == {"sum": 1}

    def leave(pids: list[int]) -> None:
        heard.extend(pids)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), result_of(job("sleeps")) as result:
        result(leave)
    assert ended(heard)


def test_jobs_run_side_by_side() -> None:
    with result_of(job("counts", 2, preload="training")) as one, result_of(job("counts", 3)) as other:
        assert (other(), one()) == ({"sum": 3}, {"sum": 1})


def test_a_job_is_forked_from_what_the_server_imported_and_has_a_group_of_its_own() -> None:
    answer = run(job("tells_where_it_is", ""))
    assert answer["imported_by"] == answer["server"] != answer["own"]
    assert answer["group"] == answer["own"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_job_whose_imports_fail_has_an_interpreter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(servers.STAGES, "engine", ["tests.children.jobs", "there_is_no_such_module"])
    answer = run(job("tells_where_it_is", ""))
    assert answer["imported_by"] == answer["own"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_later_stage_imports_once_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As vLLM, which takes ten seconds and which a command without an engine does not need."""
    (tmp_path / "says_so.py").write_text("from pathlib import Path\nPath(__file__).with_name('imported').touch()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setitem(servers.STAGES, "engine", ["says_so"])
    servers.warm_up("training")
    assert run(job("counts", 2, preload="training")) == {"sum": 1}
    time.sleep(0.5)
    assert not (tmp_path / "imported").exists()
    servers.warm_up("engine")
    wait_until((tmp_path / "imported").exists, "the import")


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_several_threads_of_a_job_can_be_the_first_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs of a server that has computed; without its fix a sixth of them fails."""
    from tests.children.computing import computes_in_threads

    monkeypatch.setitem(servers.STAGES, "training", ["tests.children.computing"])
    request = Job("the job", computes_in_threads, (), "training", "")
    assert [run(request) for _ in range(40)] == [[]] * 40


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_stage_that_nobody_asked_for_ends_with_its_parent() -> None:
    answer = run(job("tells_where_it_is", "", preload="training"))
    children = Path(f"/proc/{answer['server']}/task/{answer['server']}/children").read_text().split()
    assert children
    servers.close_servers()
    assert ended([answer["server"], *map(int, children)])


def test_a_job_has_the_folder_and_the_environment_that_its_parent_has_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = run(job("tells_where_it_is", "MARK"))
    monkeypatch.setenv("MARK", "now")
    monkeypatch.chdir(tmp_path)
    answer = run(job("tells_where_it_is", "MARK"))
    assert (first["variable"], answer["variable"]) == (None, "now")
    assert (answer["folder"], answer["server"]) == (str(tmp_path), first["server"])


@pytest.mark.slow
def test_a_variable_that_a_library_reads_once_has_everything_imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(job("tells_where_it_is", "OMP_NUM_THREADS"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    answer = run(job("tells_where_it_is", "OMP_NUM_THREADS"))
    assert answer["variable"] == "1"
    assert answer["server"] != first["server"]
    assert ended([first["server"]])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
@pytest.mark.parametrize("then", ["ends", "dies"])
def test_memory_that_a_job_shared_goes_with_it(then: str) -> None:
    heard: list[Any] = []
    if then == "dies":
        with pytest.raises(OutOfMemory):
            run(job("holds_memory", then), heard.append)
    else:
        assert run(job("holds_memory", then), heard.append) == heard[0]
    assert not Path(heard[0]).exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
def test_memory_of_another_job_stays() -> None:
    heard: list[Path] = []

    def look_at_memory(segment: str) -> None:
        heard.append(Path(segment))
        run(job("counts", 1))
        assert heard[0].exists()
        raise InterruptedError

    with result_of(job("holds_memory", "sleeps")) as result, pytest.raises(InterruptedError):
        result(look_at_memory)
    assert not heard[0].exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
def test_memory_that_a_library_named_goes_and_a_file_that_a_person_keeps_there_stays() -> None:
    kept = Path("/dev/shm") / f"weights-{os.getpid()}.safetensors"
    kept.write_bytes(bytes(16))
    heard: list[Any] = []
    try:
        with pytest.raises(OutOfMemory):
            run(job("maps_memory", str(kept)), heard.append)
        assert not Path(heard[0]).exists()
        assert kept.exists()
    finally:
        kept.unlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
def test_memory_that_a_library_named_goes_where_all_that_mapped_it_end_at_once() -> None:
    heard: list[Path] = []

    def interrupt(segment: str) -> None:
        heard.append(Path(segment))
        raise InterruptedError

    with result_of(job("maps_memory_until_it_is_ended")) as result, pytest.raises(InterruptedError):
        result(interrupt)
    assert not heard[0].exists()
