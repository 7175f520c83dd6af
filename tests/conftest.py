"""What a pytest worker prepares once, and which of its tests run first."""

import gc

import pytest

from mismatch_probe.host import prepare

prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left with one of them when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Leave what imports made, a million objects, out of each collection of garbage: a closed scorer asks for one."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
