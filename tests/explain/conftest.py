from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mismatch_probe.records.sequences import TokenSequence
from tests.explain.logs import sampled
from tests.tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made once."""

    @cache
    def folder(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family)

    return folder


@pytest.fixture(scope="session")
def llama(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="session")
def responses(llama: Path) -> list[TokenSequence]:
    return sampled(llama)
