"""A job of a localization comes back with the error that it met."""

from pathlib import Path

import pytest

from mismatch_probe.errors import EngineError
from mismatch_probe.localize.run import run_job
from mismatch_probe.localize.workspace import Workspace
from tests.children.conftest import light_servers

__all__ = ["light_servers"]


@pytest.mark.slow
def test_a_failure_of_a_job_keeps_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the engine job failed unexpectedly: FileNotFoundError"):
        run_job(Workspace(tmp_path), "engine", lambda how_far: None)
    assert "Traceback" in Workspace(tmp_path).log("engine").read_text()
