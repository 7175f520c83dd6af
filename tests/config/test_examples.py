from pathlib import Path

import pytest

from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.config.model import CompareSettings

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("compare*.toml")), ids=lambda path: path.name)
def test_every_shipped_settings_file_can_be_used(path: Path) -> None:
    assert parse_settings(CompareSettings, read_settings_file(path)).model.path


def test_there_is_one_to_use() -> None:
    assert (EXAMPLES / "compare.toml").exists()
