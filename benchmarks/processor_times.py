"""The processor time of each test with all processes that it starts: see reports/size.md.

    TIMES=FILE python -m pytest -p benchmarks.processor_times -n 1 -m slow
    python -m benchmarks.processor_times BEFORE AFTER

A plugin of pytest for a machine whose control groups may be written (root). Each worker is a group of its own, which
its servers and commands inherit, whoever waits for them. FILE gets a line of JSON for each test: its id, its seconds of
processor time and of the clock, and whether it failed. Of two such files the second command compares the tests that
both have by name.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

GROUPS: Final = Path("/sys/fs/cgroup")


class ProcessorTime:
    """Of this process and all that it starts from now on."""

    def __init__(self) -> None:
        accounting = GROUPS / "cpuacct"
        self._group = (accounting if accounting.exists() else GROUPS) / f"tests-{os.getpid()}"
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        usage = self._group / "cpuacct.usage"
        if usage.exists():
            return int(usage.read_text()) / 1e9
        fields = dict(line.split() for line in (self._group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6


class Times:
    """Writes a line for each test that this worker runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._time = ProcessorTime()
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._failed, start, begin = False, time.time(), self._time.seconds()
        result = yield
        line = [item.nodeid, round(self._time.seconds() - begin, 3), round(time.time() - start, 3), self._failed]
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        return result


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Times(Path(os.environ["TIMES"])))


def by_name(file: Path) -> tuple[Counter[str], Counter[str], set[str]]:
    """Seconds and number of the tests of each name, and the names of which one failed."""
    seconds, number, failed = Counter[str](), Counter[str](), set[str]()
    for line in file.read_text(encoding="utf-8").splitlines():
        test, processor, _, has_failed = json.loads(line)
        name = test.partition("::")[2].partition("[")[0]
        seconds[name] += processor
        number[name] += 1
        failed |= {name} if has_failed else set()
    return seconds, number, failed


def compare(before: Path, after: Path) -> None:
    first, second = by_name(before), by_name(after)
    passed = second[0].keys() - second[2] - first[2]
    both: list[Any] = [name for name in passed if name in first[0]]
    for what, (seconds, number, _) in (("before", first), ("after", second)):
        print(f"{what}: {sum(number[name] for name in both):,} tests of {len(both):,} names that both have, "
              f"{sum(seconds[name] for name in both):,.0f} s")  # fmt: skip
    new = passed - first[0].keys()
    print(f"new: {sum(second[1][name] for name in new):,} tests, {sum(second[0][name] for name in new):,.0f} s")


if __name__ == "__main__":
    compare(*map(Path, sys.argv[1:]))
