"""The manifest keeps how long a stage waited for its engine or model, beside how long its batches took."""

from pathlib import Path

import pytest

from mismatch_probe.compare import run as comparison
from mismatch_probe.compare.plan import BatchDone, StageDone, StageStarted
from mismatch_probe.compare.run import Recorder
from mismatch_probe.records.manifest import StageRecord
from tests.simulated_run import Simulation, simulated_manifest, simulated_run

FIRST, SECOND = "sample-bf16", "score-ref-fp32"


def test_a_start_is_what_lies_between_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(comparison.time, "monotonic", lambda: now[0])
    simulation = Simulation(num_prompts=4)
    run, manifest = simulated_run(tmp_path / "run", simulation), simulated_manifest(simulation)
    hear = Recorder(run, manifest, lambda event: None, {})
    for stage, starts, ends in ((FIRST, 107.0, 120.0), (SECOND, 121.5, 130.0)):
        now[0] = starts
        hear(StageStarted(stage=stage, batches=1, batches_done=0))
        hear(BatchDone(stage=stage, sequences=4, tokens=40, seconds=8.5))
        now[0] = ends
        hear(StageDone(stage=stage))
    stages = run.read_manifest().stages
    assert (stages[FIRST].start_seconds, stages[SECOND].start_seconds) == (7.0, 1.5)
    assert stages["score-train-bf16"].start_seconds is None


def test_an_extension_keeps_the_start_of_the_first_part() -> None:
    first, added = StageRecord(start_seconds=4.0), StageRecord(start_seconds=2.0)
    assert first.followed_by(added).start_seconds == 4.0
    assert StageRecord().followed_by(added).start_seconds == 2.0
