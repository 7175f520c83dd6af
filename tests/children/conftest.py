"""Servers that import nothing heavy."""

from collections.abc import Iterator

import pytest

from mismatch_probe.children import preloads, servers


@pytest.fixture(autouse=True)
def light_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(servers, "_servers", None)
    monkeypatch.setitem(preloads.STAGES, "training", ["json"])
    monkeypatch.setitem(preloads.STAGES, "engine", ["tests.children.jobs"])
    yield
    servers.close_servers()
