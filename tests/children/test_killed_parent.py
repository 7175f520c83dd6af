"""A parent that is killed leaves no process and no scratch folder, whatever its jobs are at."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.halts import wait_until
from tests.processes import ended

WITH_ENGINE = r"""
import json, os, subprocess, sys
from pathlib import Path
from mismatch_probe.children import messages, servers
token = messages.own_token()
files = [messages.SEGMENTS / name for name in (f"psm_{os.getpid():08x}", f"{token}-ranks-0")]
for file in files:
    file.write_text("x")
servers.keep_engine(token, files[:1])
holds = "from tests.children import jobs\njobs.maps_memory_until_it_is_ended(lambda path: print(path, flush=True))"
process = subprocess.Popen(
    [sys.executable, "-c", holds],
    env={**os.environ, messages.SHARED_MEMORY_VARIABLE: token},
    stdout=subprocess.PIPE,
    text=True,
)
mapped = process.stdout.readline().strip()
print(json.dumps([[servers._keeper._process.pid, process.pid], [mapped, *map(str, files)]]), flush=True)
process.wait()
"""
"""A command with an engine of its own, whose process has memory under a library's name mapped."""

PARENT = """
import json, sys
from pathlib import Path
from mismatch_probe.children import servers
from mismatch_probe.children.start import Job, run
from tests.children import jobs
servers.STAGES["training"] = ["json"]
servers.STAGES["engine"] = sys.argv[2:]
servers.keep_scratch(Path(sys.argv[1]))
print(servers._servers._process.pid, flush=True)
job = Job("job", jobs.FUNCTION, ("ARGUMENT",), "engine", "")
run(job, lambda told: print(json.dumps(told), flush=True))
"""


def parent(
    scratch: Path, *modules: str, function: str = "sleeps", argument: str | None = None
) -> subprocess.Popen[str]:
    scratch.mkdir()
    text = PARENT.replace("FUNCTION", function).replace("ARGUMENT", argument or str(scratch))
    return subprocess.Popen([sys.executable, "-c", text, str(scratch), *modules], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [("tests.children.jobs",), ("there_is_no_such_module",)])
def test_the_job_and_what_it_started_end_and_the_scratch_folder_goes(tmp_path: Path, modules: tuple[str, ...]) -> None:
    with parent(tmp_path / "scratch", *modules) as process:
        assert process.stdout is not None
        server, pids = int(process.stdout.readline()), json.loads(process.stdout.readline())
        assert (tmp_path / "scratch" / "activations").exists()
        process.kill()
    assert ended([server, *pids])
    assert not (tmp_path / "scratch").exists()


@pytest.mark.slow
def test_a_server_that_is_still_importing_ends_too(tmp_path: Path) -> None:
    with parent(tmp_path / "scratch", "tests.children.slow_import") as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        time.sleep(0.5)
        process.kill()
    assert ended([server])
    wait_until(lambda: not (tmp_path / "scratch").exists(), "its scratch folder is removed")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
def test_memory_that_the_job_shared_goes(tmp_path: Path) -> None:
    with parent(tmp_path / "scratch", "tests.children.jobs", function="holds_memory", argument="sleeps") as process:
        assert process.stdout is not None
        server, segment = int(process.stdout.readline()), Path(json.loads(process.stdout.readline()))
        assert segment.exists()
        process.kill()
    assert ended([server])
    assert not segment.exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no named memory")
def test_what_an_engine_of_the_command_itself_shares_goes_with_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", WITH_ENGINE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids, files = json.loads(process.stdout.readline())
        assert [file for file in files if not Path(file).exists()] == []
        process.kill()
    assert ended(pids)
    assert [file for file in files if Path(file).exists()] == []


def test_a_wait_for_an_event_ends_with_the_process_that_it_is_of() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for gone in (process, process.pid):
        with pytest.raises(AssertionError, match="the process ended before a part"):
            wait_until(lambda: False, "a part", gone)
