"""`compare --headroom`: yes or no to training in FP16, of real vLLM and the real examination together."""

import json
import shutil
from pathlib import Path

import pytest

from mismatch_probe.causes.findings import HeadroomCode
from mismatch_probe.errors import ExitCode, OutOfMemory
from mismatch_probe.records.findings import Findings
from tests.command_line import FEW, Answer, probe
from tests.headroom.planted import planted

pytestmark = pytest.mark.slow

SMALL = ("--prompts", "sums:easy", "--num-prompts", 8, "--max-new-tokens", 16, "--config", FEW)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A run of the demo checkpoint, and what the command said."""
    run = tmp_path_factory.mktemp("demo") / "run"
    return run, probe("compare", "--model", "demo", "--headroom", "--out", run, *SMALL, "--json", code=ExitCode.PASS)


def test_the_demo_checkpoint_is_to_be_trained_in_fp16_and_is_examined_once(compared: tuple[Path, Answer]) -> None:
    run, ended = compared
    headline = json.loads(ended.stdout)["headline"]
    yes = "Train in FP16: yes, the checkpoint fits FP16 with a loss scale (headroom)."
    assert headline.startswith(f"{yes} No bug. BF16 rounding costs KL ")
    assert headline in ended.stderr.replace("\n", " ")
    assert 'id="headroom"' in (run / "report.html").read_text(encoding="utf-8")
    examined = (run / "headroom.json").read_bytes()
    again = probe("compare", "--resume", "--headroom", "--out", run, "--json", code=ExitCode.PASS)
    assert json.loads(again.stdout)["headline"] == headline
    assert (run / "headroom.json").read_bytes() == examined


def test_a_model_that_overflows_fp16_is_not(tmp_path: Path) -> None:
    model, run = planted(tmp_path / "model", changes={"layers.1.mlp.down_proj": 2.0**16}), tmp_path / "run"
    ended = probe("compare", "--model", model, "--headroom", "--out", run, *SMALL, "--json")
    found = Findings(run).headroom()
    assert found is not None
    assert found.verdict.code == HeadroomCode.FITS_EXCEPT
    assert "Train in FP16: no, the checkpoint fits FP16 except some modules (headroom)." in ended.stderr.replace(
        "\n", " "
    )


def test_where_the_checkpoint_cannot_be_examined_the_comparison_keeps_its_answer(
    compared: tuple[Path, Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that was examined, without what was found."""

    def refuse(*_: object) -> None:
        raise OutOfMemory("it does not fit")

    monkeypatch.setattr("mismatch_probe.headroom.run.measure_headroom", refuse)
    run = shutil.copytree(compared[0], tmp_path / "run")
    (run / "headroom.json").unlink()
    ended = probe("compare", "--resume", "--headroom", "--out", run, "--json", code=ExitCode.PASS)
    headline = json.loads(ended.stdout)["headline"]
    assert headline.startswith("No bug. BF16 rounding costs KL ")
    assert " Train in FP16: undecided, headroom could not examine the checkpoint: it does not fit." in headline
    assert headline in ended.stderr.replace("\n", " ")
