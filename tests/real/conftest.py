"""Real checkpoints, where `make real` could make them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("REAL") or ROOT / "build/real")
CHATS = ROOT / "examples/prompts/chats.jsonl"


def checkpoint_in(folder: Path, name: str) -> Path:
    """The folder of a checkpoint; skips the test that needs it where it is not there."""
    if not (folder / name / "config.json").exists():
        pytest.skip(f"{name} is not in {folder}: `make real` makes it where its packages can be had")
    return folder / name


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return checkpoint_in(FOLDER, "smollm2")


@pytest.fixture(params=["smollm2", "gemma3"])
def either(request: pytest.FixtureRequest) -> Path:
    return checkpoint_in(FOLDER, request.param)
