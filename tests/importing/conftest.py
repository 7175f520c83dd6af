"""What tests of `watch` start from."""

from pathlib import Path

import pytest

from tests.importing.watching import LIMIT


@pytest.fixture
def guards(tmp_path: Path) -> Path:
    path = tmp_path / "guards.toml"
    path.write_text(LIMIT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.mkdir()
    return path
