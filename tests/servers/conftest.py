"""One real server for all tests; who kills it starts it again."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.engines.server import connection
from tests.servers.real_server import TAKES_WEIGHTS, RealServer, WarmServer, demo_checkpoint


@pytest.fixture(scope="package")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Weights can be sent to it."""
    log = tmp_path_factory.mktemp("server") / "log"
    with WarmServer(log, "--enable-scale-out", *TAKES_WEIGHTS) as server:
        yield server


@pytest.fixture(autouse=True)
def _tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server here needs no time to recover."""
    monkeypatch.setattr(connection, "_FIRST_WAIT_SECONDS", 0.05)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with every weight off by 5 %."""
    folder: Path = shutil.copytree(demo_checkpoint(), tmp_path_factory.mktemp("checkpoints") / "other")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    moved = {
        name: (weight.float() * (1 + 0.05 * torch.randn(weight.shape, generator=generator))).to(weight.dtype)
        for name, weight in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
