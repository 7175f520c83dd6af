"""One real server for all tests of a worker; those that kill theirs start one of their own."""

from collections.abc import Iterator

import pytest

from tests.cores import every_core
from tests.servers.real_server import RealServer


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with every_core(), RealServer(tmp_path_factory.mktemp("server") / "log", "--enable-scale-out") as server:
        yield server
