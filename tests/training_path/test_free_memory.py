"""What a process can still take: the least that the machine, its group and its own limits leave."""

import resource
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from mismatch_probe.errors import OutOfMemory
from mismatch_probe.training_path import memory as measured
from mismatch_probe.training_path.memory import free_memory, memory_errors_named

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the process's group, below the one that all groups stand in."""
    own = tmp_path / "jobs" / "mine"
    own.mkdir(parents=True)
    monkeypatch.setattr(measured, "_own_groups", lambda: [tmp_path, own.parent, own])
    return own


def test_without_limits_it_is_what_the_machine_has_left(group: Path) -> None:
    assert free_memory(CPU) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_limit_of_a_group_counts_without_what_it_caches_of_files(group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{100 * MIB}\n")
    (group.parent / "memory.current").write_text(f"{90 * MIB}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {30 * MIB}\n")
    assert free_memory(CPU) == 40 * MIB


def test_the_older_interface_of_groups_is_read_too(group: Path) -> None:
    (group / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{120 * MIB}\n")
    assert free_memory(CPU) == 0


def test_the_groups_of_both_versions_are_named_by_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_GROUPS", tmp_path)
    text = "5:cpuset:/a\n4:cpu,memory:/b/c\n0::/d\n"
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: text if path == Path("/proc/self/cgroup") else read(path))
    top = tmp_path / "memory"
    assert measured._own_groups() == [top, top / "b/c", top / "b", tmp_path, tmp_path / "d"]


def test_what_the_process_may_allocate_counts(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = measured._process_bytes()["VmData:"]
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: taken + 50 * MIB}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert free_memory(CPU) == pytest.approx(50 * MIB, abs=5 * MIB)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_file_that_cannot_be_mapped_is_out_of_memory(error: type[Exception]) -> None:
    sentence = "out of memory while reading; free some"
    with pytest.raises(OutOfMemory, match=sentence), memory_errors_named("reading", "free some"):
        raise error("unable to mmap 40 bytes from file <a>: Cannot allocate memory (12)")
    with pytest.raises(error, match="broken"), memory_errors_named("reading", "free some"):
        raise error("broken")
