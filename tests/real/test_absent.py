"""Tests on real checkpoints are skipped with a reason where there are none."""

from pathlib import Path

import pytest

from tests.real.conftest import checkpoint_in


def test_a_checkpoint_that_could_not_be_made_skips_its_tests_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"smollm2 is not in .*: `make real` makes it"):
        checkpoint_in(tmp_path, "smollm2")
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2/config.json").write_text("{}")
    assert checkpoint_in(tmp_path, "smollm2") == tmp_path / "smollm2"
