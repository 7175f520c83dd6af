"""A run takes more dtypes: what is recorded stays, and only what the new pairs lack is computed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from mismatch_probe.compare.continuation import (
    as_prepared,
    continuation,
    pairs_to_add,
    require_same,
    samplers_left,
    with_added_pairs,
)
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preflight import with_typed_engines
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run import execute, resume_run
from mismatch_probe.compare.stages import LegStage, SampleStage, ScoreStage
from mismatch_probe.config.resuming import resumed_comparison
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import RunDirectoryError, UsageError
from mismatch_probe.provenance.environment import content_key
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests.simulated_run import Simulation, simulated_manifest, simulated_prompts, simulated_run

FIRST = Simulation(num_prompts=6, mean_length=20, pairs=((Dtype.FP32, Dtype.BF16),))
ADDED = replace(FIRST, pairs=((Dtype.FP32, Dtype.FP32), (Dtype.BF16, Dtype.BF16)))
BOTH = replace(FIRST, pairs=(*FIRST.pairs, *ADDED.pairs))


def manifest_of(simulation: Simulation) -> Manifest:
    manifest = simulated_manifest(simulation)
    key = content_key(manifest.settings.model_dump(mode="json"))
    return manifest.model_copy(update={"content_keys": manifest.content_keys | {"settings": key}})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = simulated_run(tmp_path / "run", FIRST, with_summary=True)
    run.write_manifest(manifest_of(FIRST))
    return run


@pytest.fixture
def complete_run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "whole", BOTH, with_summary=True)


def asked_for(run: RunDirectory, simulation: Simulation) -> None:
    resume_run(run.path, Preparation(manifest_of(simulation), simulated_prompts(simulation)))


def computed(run: RunDirectory, complete_run: RunDirectory) -> None:
    """What the children would do, taken from a run that was made in one go: the parts of every stage that has work."""
    manifest = with_added_pairs(run.read_manifest())
    for stage in make_plan(manifest.settings).leg_stages:
        if manifest.stages[stage.name].state != "done":
            manifest.stages[stage.name] = StageRecord(
                state="running", batches=1, effective_settings={"dtype": stage.side.dtype}
            )
            parts = run.parts(stage.name, stage.outputs)
            parts.open()
            parts.write(0, {output: _rows(run, complete_run, stage, output) for output in stage.outputs})
    run.write_manifest(manifest)


def _rows(run: RunDirectory, complete_run: RunDirectory, stage: LegStage, output: str) -> pa.Table:
    table = read_table(complete_run.rollouts_path if output == "rollouts" else complete_run.leg_path(output))
    samplers = (stage.side.sampler,) if isinstance(stage, SampleStage) else ()
    samplers = samplers_left(run, stage) if isinstance(stage, ScoreStage) else samplers
    return table.filter(pc.is_in(pc.list_element(pc.split_pattern(table["id"], "@"), 1), pa.array(samplers)))


@pytest.mark.slow
def test_a_run_that_was_given_dtypes_is_the_run_that_was_made_in_one_go(
    run: RunDirectory, complete_run: RunDirectory
) -> None:
    asked_for(run, ADDED)
    computed(run, complete_run)
    summary = execute(run, lambda event: None)
    assert [(pair.train, pair.infer) for pair in summary.pairs] == list(BOTH.pairs)
    assert summary.pairs == complete_run.read_summary().pairs
    for path in (run.rollouts_path, *map(run.leg_path, ("ref-fp32", "train-fp32", "train-bf16", "infer-fp32-decode"))):
        assert read_table(path).equals(read_table(complete_run.path / path.relative_to(run.path)))
    assert not (run.path / "parts").exists()


@pytest.mark.slow
def test_a_leg_that_needs_no_row_stays_as_it_is_byte_for_byte(run: RunDirectory, complete_run: RunDirectory) -> None:
    leg = run.leg_path("infer-bf16-decode")
    before, changed_at = leg.read_bytes(), leg.stat().st_mtime_ns
    asked_for(run, ADDED)
    computed(run, complete_run)
    execute(run, lambda event: None)
    assert (leg.read_bytes(), leg.stat().st_mtime_ns) == (before, changed_at)


def test_only_what_is_new_is_to_be_done(run: RunDirectory) -> None:
    asked_for(run, ADDED)
    manifest = with_added_pairs(run.read_manifest())
    plan = make_plan(manifest.settings)
    work = {stage.name for stage in plan.stages if manifest.stages[stage.name].state == "pending"}
    assert work == {"sample-fp32", "score-ref-fp32", "score-train-fp32", "score-train-bf16"}
    left = {stage.leg: samplers_left(run, stage) for stage in plan.stages if isinstance(stage, ScoreStage)}
    assert left == {"ref-fp32": ("infer-fp32",), "train-fp32": ("infer-fp32",), "train-bf16": ("infer-bf16",)}
    assert set(manifest.growing) == {"score-ref-fp32", "score-train-fp32"}


@pytest.mark.slow
def test_the_manifest_says_what_was_added_and_when_and_adds_up_the_progress(
    run: RunDirectory, complete_run: RunDirectory
) -> None:
    asked_for(run, ADDED)
    [taken_up] = run.read_manifest().continued
    assert taken_up.added == list(ADDED.pairs)
    assert taken_up.at.startswith("20")
    computed(run, complete_run)
    execute(run, lambda event: None)
    manifest = run.read_manifest()
    assert manifest.settings.pairs == BOTH.pairs
    assert manifest.content_keys["settings"] == content_key(manifest.settings.model_dump(mode="json"))
    assert manifest.growing == {}
    assert {stage.state for stage in manifest.stages.values()} == {"done"}
    assert manifest.stages["score-ref-fp32"].batches == 2
    assert manifest.stages["sample-bf16"].batches == 1


def test_dtypes_that_the_run_has_are_neither_added_nor_taken_away(run: RunDirectory) -> None:
    asked_for(run, replace(FIRST, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.BF16))))
    asked_for(run, ADDED)
    assert [continued.added for continued in run.read_manifest().continued] == [[("bf16", "bf16")], [("fp32", "fp32")]]
    assert pairs_to_add(run.read_manifest()) == [("bf16", "bf16"), ("fp32", "fp32")]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"sampling": {"temperature": 0.5}}, r"sampling.temperature = 1.0 \(now 0.5\)"), ({"vllm": "0.99"}, "vllm =")],
)
def test_whatever_else_differs_is_refused_by_its_name(run: RunDirectory, change: dict[str, Any], words: str) -> None:
    before = run.manifest_path.read_bytes()
    with pytest.raises(RunDirectoryError, match=words) as refused:
        asked_for(run, replace(ADDED, **change))
    assert "pairs" not in str(refused.value)
    assert run.manifest_path.read_bytes() == before


@pytest.mark.slow
def test_a_kill_between_a_grown_leg_and_the_manifest_adds_no_row_twice(
    run: RunDirectory, complete_run: RunDirectory
) -> None:
    asked_for(run, ADDED)
    computed(run, complete_run)
    for leg in ("ref-fp32", "train-fp32"):
        complete_run.leg_path(leg).replace(run.leg_path(leg))
    complete_run.rollouts_path.replace(run.rollouts_path)
    summary = execute(run, lambda event: None)
    assert summary.pairs == complete_run.read_summary().pairs
    assert run.read_manifest().growing == {}


def test_a_leg_that_is_lost_while_it_grows_is_scored_whole(run: RunDirectory) -> None:
    asked_for(run, ADDED)
    run.leg_path("ref-fp32").unlink()
    plan = make_plan(with_added_pairs(run.read_manifest()).settings)
    [stage] = [stage for stage in plan.stages if isinstance(stage, ScoreStage) and stage.side.role == "ref"]
    assert samplers_left(run, stage) == ("infer-bf16", "infer-fp32")


@pytest.mark.slow
def test_sides_that_wait_in_a_strangers_manifest_count_only_when_they_are_given_now(run: RunDirectory) -> None:
    asked_for(run, ADDED)
    manifest = run.read_manifest()
    evil = InferSide(name="evil", dtype=Dtype.BF16, args={"worker_cls": "evil.Worker"})
    manifest.continued[0].added.append(("bf16", "evil"))
    manifest.continued[0].infer.append(evil)
    run.write_manifest(manifest)
    with pytest.raises(UsageError, match=r"--infer evil:dtype=bf16,worker_cls=evil\.Worker.*what runs code"):
        resumed_comparison(run.path, run.read_manifest().asked_settings, {}, with_typed_engines)
    asked_for(run, ADDED)
    with pytest.raises(UsageError, match="'evil' cannot be used"):
        make_plan(with_added_pairs(run.read_manifest()).settings)


def test_a_side_with_a_checkpoint_of_its_own_can_be_added(run: RunDirectory) -> None:
    stale = InferSide(name="stale", dtype=Dtype.BF16, checkpoint="ckpt/a")
    recorded = run.read_manifest()
    settings = recorded.settings.with_more([("bf16", "stale")], [stale], [])
    keys = recorded.content_keys | {"checkpoint ckpt/a": "A"}
    other = recorded.model.model_copy(update={"name": "ckpt/a", "fingerprint": "A"})
    now = recorded.model_copy(
        update={"settings": settings, "content_keys": keys, "checkpoints": {"ckpt/a": other}, "continued": []}
    )
    require_same(run.path, recorded, now)
    grown = as_prepared(recorded, now)
    grown.continued.append(continuation(recorded, now))
    grown = with_added_pairs(grown)
    assert grown.identity_of(grown.settings.mu("stale")).fingerprint == "A"
    assert grown.stages["sample-stale"].state == "pending"
    again = now.model_copy(update={"content_keys": keys | {"checkpoint ckpt/a": "B"}})
    with pytest.raises(RunDirectoryError, match="another checkpoint ckpt/a content"):
        require_same(run.path, grown, again)
