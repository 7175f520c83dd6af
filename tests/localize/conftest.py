from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tiny_models import make_checkpoint

NUM_LAYERS = 2


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made once."""

    @cache
    def folder(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, num_hidden_layers=NUM_LAYERS)

    return folder
