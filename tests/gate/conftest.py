from pathlib import Path

import pytest

from mismatch_probe.records.run_directory import RunDirectory
from tests.simulated_run import Simulation, simulated_run

SIZE = 256


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """256 responses of BF16 against BF16; tests only read it."""
    return simulated_run(tmp_path_factory.mktemp("runs") / "baseline", Simulation(num_prompts=SIZE))


@pytest.fixture(scope="session")
def worse(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The same responses with 1.5 times the error on the training side, as after a bad upgrade."""
    simulation = Simulation(num_prompts=SIZE, worse=1.5, noise_seed=1, vllm="0.33.0")
    return simulated_run(tmp_path_factory.mktemp("runs") / "worse", simulation)


@pytest.fixture
def small(tmp_path: Path) -> RunDirectory:
    """A run that a test may break."""
    return simulated_run(tmp_path / "small", Simulation(num_prompts=32, mean_length=20))
