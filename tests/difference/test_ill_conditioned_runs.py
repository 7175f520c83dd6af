"""What `diff` and `gate` say of a checkpoint that FP32 cannot compute."""

from pathlib import Path

import pytest

from mismatch_probe.difference.runs import difference_of
from mismatch_probe.dtypes import Dtype
from mismatch_probe.gate.run import run_gate
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import Verdict
from tests.gate.cli import GATE, REGRESSION, check, gate_file
from tests.simulated_run import Simulation, make_ill_conditioned, simulated_run

FP32 = Simulation(num_prompts=32, mean_length=20, pairs=((Dtype.FP32, Dtype.FP32),))
CLAUSE = "FP32 itself is 0.00244 nats a token from FP64 on "


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return simulated_run(tmp_path_factory.mktemp("runs") / "sound", FP32, with_summary=True)


@pytest.fixture(scope="module")
def ill_conditioned(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = simulated_run(tmp_path_factory.mktemp("runs") / "ill-conditioned", FP32)
    make_ill_conditioned(run)
    return run


def verdict_of(run: RunDirectory) -> Verdict:
    [pair] = run.read_summary().pairs
    return pair.verdict


def test_the_verdict_is_ill_conditioned(ill_conditioned: RunDirectory, sound: RunDirectory) -> None:
    assert (verdict_of(ill_conditioned).kind, verdict_of(ill_conditioned).code) == ("precision", "ill_conditioned")
    assert verdict_of(sound).code == "clean"


def test_a_difference_has_a_ratio_and_says_whose_fp32_is_far_from_fp64(
    ill_conditioned: RunDirectory, sound: RunDirectory
) -> None:
    [pair] = difference_of(sound, ill_conditioned).pairs
    assert pair.sentence.startswith("the second run is worse: ")
    assert pair.sentence.endswith(f"; {CLAUSE}the checkpoint of the second run")
    [back] = difference_of(ill_conditioned, sound).pairs
    assert back.sentence.endswith(f"; {CLAUSE}the checkpoint of the first run")
    [same] = difference_of(sound, sound).pairs
    assert "FP64" not in same.sentence


def test_a_gate_judges_by_its_limits_and_notes_that_they_may_find_rounding(
    ill_conditioned: RunDirectory, sound: RunDirectory, tmp_path: Path
) -> None:
    gate = gate_file(tmp_path, GATE + check(metric="abs_logprob_diff", max=1e-4) + REGRESSION)
    result = run_gate(ill_conditioned.path, gate, sound.path)
    assert result.answer == "fail"
    [note] = [note for note in result.notes if "FP64" in note]
    assert note.startswith(f"fp32/fp32: {CLAUSE}this checkpoint, so what its limits find may be rounding")
    other = run_gate(sound.path, gate, ill_conditioned.path)
    assert other.answer == "pass"
    assert not [note for note in other.notes if "FP64" in note]
