from pathlib import Path

import pytest

from mismatch_probe.records.sequences import TokenSequence
from tests.explain.logs import sampled


@pytest.fixture(scope="session")
def responses(llama: Path) -> list[TokenSequence]:
    return sampled(llama)
