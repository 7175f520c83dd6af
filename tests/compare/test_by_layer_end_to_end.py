"""`compare` with the reference layer by layer: the same leg as whole, said and recorded, and killed with SIGKILL."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from mismatch_probe.records.tables import read_table
from tests.command_line import FEW, probe
from tests.halts import wait_until
from tests.processes import wait_until_gone
from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_process

pytestmark = pytest.mark.slow

SMALL = (
    "--prompts", "sums:easy", "--num-prompts", "4", "--max-new-tokens", "12", "--dtype", "bf16",
    "--vllm.enforce_eager", "true", "--config", FEW,
)  # fmt: skip
LAYERS = 4
REFERENCE = "score-ref-fp32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def complete_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    probe("compare", "--model", model, *SMALL, "--out", run)
    return run


def without_reference(complete_run: Path, run: Path) -> Path:
    """The run as it was when its reference was still to be scored."""
    shutil.copytree(complete_run, run)
    for leg in ("ref-fp32", "ref-fp32-weights-bf16"):
        (run / "legs" / f"{leg}.parquet").unlink(missing_ok=True)
    (run / "summary.json").unlink()
    return run


def reference(run: Path) -> dict[str, list[object]]:
    return read_table(run / "legs" / "ref-fp32.parquet").to_pydict()


def test_a_run_that_is_resumed_with_the_flag_has_the_same_leg_and_says_why(complete_run: Path, tmp_path: Path) -> None:
    run = without_reference(complete_run, tmp_path / "run")
    output = probe("compare", "--out", run, "--resume", "--reference-by-layer").stderr
    assert f"{REFERENCE}: layer by layer, since reference.by_layer asks for it" in output
    assert reference(run) == reference(complete_run)
    assert (run / "summary.json").read_bytes() == (complete_run / "summary.json").read_bytes()
    assert not (run / "parts").exists()


def test_a_killed_one_goes_on_and_has_the_same_leg(complete_run: Path, tmp_path: Path) -> None:
    run = without_reference(complete_run, tmp_path / "run")
    words = ("after-layer", "compare", "--out", run, "--resume", "--reference-by-layer")
    hidden = run / "parts" / REFERENCE / "hidden"
    with warm_process("tests.halts", *words, folder=tmp_path, errors=tmp_path / "stderr") as process:
        wait_until(lambda: list(hidden.glob("[0-9]*")), "the first layer", process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(tmp_path)
    assert not (run / "legs" / "ref-fp32.parquet").exists()
    output = probe("compare", "--out", run, "--resume").stderr
    assert f"{REFERENCE}: layer by layer, since it was begun so" in output
    assert reference(run) == reference(complete_run)
    applied = json.loads((run / "manifest.json").read_text())["stages"][REFERENCE]["effective_settings"]
    assert applied["by_layer"]["layers"] == LAYERS
