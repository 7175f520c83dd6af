"""What a pytest worker prepares once, which of its tests run first, and on which servers."""

import gc
from collections.abc import Generator

import pytest

from mismatch_probe.children import preloads, servers
from mismatch_probe.host import prepare
from tests.garbage import spare_the_collector

prepare()

_kept: dict[bool, servers._Servers | None] = {}
"""By whether the test is slow: the servers that the next such test finds running."""


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left with one of them when the others have ended."""
    slow = {item.path for item in items if is_slow(item)}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    spare_the_collector()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Servers that import what engines need serve the slow tests alone: the others run no job that needs it."""
    slow = is_slow(item)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_servers", _kept.get(slow))
        if not slow:
            for name in preloads.STAGES:
                patch.setitem(preloads.STAGES, name, ["json"])
        try:
            return (yield)
        finally:
            _kept[slow] = servers._servers
            if slow and nextitem is not None and nextitem.path != item.path:
                spare_the_collector()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    for kept in _kept.values():
        if kept is not None:
            kept.close()
