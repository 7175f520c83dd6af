"""What the command line does first, for tests that call the rooms behind it; which tests run first, on which servers."""

from collections.abc import Generator

import pytest

from mismatch_probe.children import preloads, servers
from mismatch_probe.host import prepare

prepare()

_LIGHT = dict.fromkeys(preloads.STAGES, ["json"])
_kept: dict[bool, servers._Servers | None] = {}
"""By whether the test is slow: the servers that the next such test finds running."""


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left with one of them when the others have ended."""
    slow = {item.path for item in items if is_slow(item)}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Servers that import what engines need serve the slow tests alone: the others run no job that needs it."""
    slow = is_slow(item)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_servers", _kept.get(slow))
        for name, modules in ({} if slow else _LIGHT).items():
            patch.setitem(preloads.STAGES, name, modules)
        try:
            return (yield)
        finally:
            _kept[slow] = servers._servers


def pytest_sessionfinish() -> None:
    for kept in _kept.values():
        if kept is not None:
            kept.close()
