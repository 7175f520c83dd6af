"""Servers that import nothing heavy."""

from collections.abc import Iterator

import pytest

from mismatch_probe.children import servers


@pytest.fixture(scope="module", autouse=True)
def light_servers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_servers", None)
        patch.setitem(servers.STAGES, "training", ["json"])
        patch.setitem(servers.STAGES, "engine", ["tests.children.jobs"])
        yield
        servers.close_servers()


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of one test, which says what they import; those of the other tests stay."""
    monkeypatch.setattr(servers, "_servers", None)
    yield
    servers.close_servers()
