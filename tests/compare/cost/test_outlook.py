"""From a prepared comparison and the runs beside it to a forecast: lengths, rates and stages that were really taken."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from mismatch_probe.compare.cost import earlier as module
from mismatch_probe.compare.cost.earlier import MAX_NEW_TOKENS
from mismatch_probe.compare.cost.forecast import run_clock
from mismatch_probe.compare.estimates import done_stages, look_ahead
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.provenance import checkpoint
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import write_table
from tests.compare.cost.workloads import calibration
from tests.simulated_run import Simulation, edit_manifest, simulated_manifest, simulated_prompts, simulated_run
from tests.tiny_models import make_checkpoint

SIMULATION = Simulation(num_prompts=16, sampling={"max_new_tokens": 300})
NEW = replace(SIMULATION, num_prompts=32)


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of round numbers; those of this machine are `tests/training_path/test_timing.py`'s."""
    monkeypatch.setattr(module, "measure", lambda *arguments: calibration())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


def of_checkpoint(manifest: Manifest, folder: Path) -> Manifest:
    model = manifest.model.model_copy(update={"folder": str(folder), "weight_bytes": checkpoint.weight_bytes(folder)})
    return manifest.model_copy(update={"model": model})


def prepared(folder: Path, simulation: Simulation = NEW) -> Preparation:
    return Preparation(of_checkpoint(simulated_manifest(simulation), folder), simulated_prompts(simulation))


def earlier(path: Path, folder: Path, seconds: float = 20.0) -> RunDirectory:
    run = simulated_run(path, SIMULATION)

    def took(manifest: Manifest) -> None:
        manifest.model = of_checkpoint(manifest, folder).model
        for record in manifest.stages.values():
            record.seconds, record.start_seconds = seconds, 3.0

    edit_manifest(run, took)
    return run


def test_without_earlier_runs_responses_count_at_their_limit(tmp_path: Path, folder: Path) -> None:
    outlook = look_ahead(prepared(folder), tmp_path, [], 6.0).outlook
    assert outlook is not None
    assert (outlook.response_tokens, outlook.response_tokens_from, outlook.earlier_runs) == (300, MAX_NEW_TOKENS, [])
    assert [stage.stage for stage in outlook.time.stages] == ["sample-bf16", "score-ref-fp32", "score-train-bf16"]
    assert outlook.time.total.low_seconds < outlook.time.total.likely_seconds < outlook.time.total.high_seconds
    assert outlook.time.unknown_starts == []


def test_an_earlier_run_tells_lengths_starts_and_paces(tmp_path: Path, folder: Path) -> None:
    earlier(tmp_path / "before", folder)
    outlook = look_ahead(prepared(folder), tmp_path, [], 6.0).outlook
    assert outlook is not None
    assert outlook.earlier_runs == [str(tmp_path / "before")]
    assert outlook.response_tokens_from == str(tmp_path / "before")
    assert 40 < outlook.response_tokens < 90, "as simulated"
    for stage in outlook.time.stages:
        assert stage.start is not None
        assert stage.start.likely_seconds == 3
        assert stage.work.low_seconds < 20, "most of what half of the prompts took was perhaps spent once"
        assert 20 <= stage.work.likely_seconds <= 40


@pytest.mark.parametrize(
    "other", ["another size", "another machine", "another kind", "no manifest", "broken", "other columns", "no time"]
)
def test_a_run_that_is_not_alike_tells_nothing(tmp_path: Path, folder: Path, other: str) -> None:
    run = earlier(tmp_path / "before", folder)
    preparation = prepared(folder)
    if other == "another size":
        edit_manifest(run, lambda manifest: setattr(manifest.model, "weight_bytes", 7))
    elif other == "another machine":
        edit_manifest(run, lambda manifest: manifest.content_keys.update(hardware="another"))
    elif other == "another kind":
        run.manifest_path.write_text('{"training_version": 1}')
    elif other == "no manifest":
        run.manifest_path.unlink()
    elif other == "broken":
        run.manifest_path.write_text("{")
    elif other == "other columns":
        write_table(run.rollouts_path, pa.table({"token_ids": [1, 2]}))
    else:
        edit_manifest(run, lambda manifest: [setattr(stage, "seconds", -1.0) for stage in manifest.stages.values()])
    outlook = look_ahead(preparation, tmp_path, [], 6.0).outlook
    assert outlook is not None
    assert outlook.earlier_runs == []


def test_shorter_responses_before_do_not_tell_of_a_higher_limit(tmp_path: Path, folder: Path) -> None:
    earlier(tmp_path / "before", folder)
    longer = replace(NEW, sampling={"max_new_tokens": 900})
    outlook = look_ahead(prepared(folder, longer), tmp_path, [], 6.0).outlook
    assert outlook is not None
    assert outlook.response_tokens_from == MAX_NEW_TOKENS


def test_stages_that_are_recorded_are_not_counted_again(tmp_path: Path, folder: Path) -> None:
    run = earlier(tmp_path / "run", folder)
    edit_manifest(run, lambda manifest: setattr(manifest.stages["score-train-bf16"], "state", "running"))
    outlook = look_ahead(prepared(folder, SIMULATION), tmp_path, done_stages(run), 6.0).outlook
    assert outlook is not None
    assert [stage.stage for stage in outlook.time.stages] == ["score-train-bf16"]
    clock = run_clock(prepared(folder, SIMULATION), run)
    assert clock is not None
    left = clock.remaining()
    assert left is not None
    assert 20 in left


def test_a_check_of_rounding_is_no_part_of_the_time_and_costs_more_than_the_reference(
    tmp_path: Path, folder: Path
) -> None:
    """The rates are equal for all formats here, and weights in FP64 take twice the bytes."""
    outlook = look_ahead(prepared(folder), tmp_path, [], 6.0).outlook
    assert outlook is not None
    assert outlook.rounding_check is not None
    reference = next(stage for stage in outlook.time.stages if stage.stage == "score-ref-fp32")
    assert outlook.rounding_check.time.likely_seconds >= reference.work.likely_seconds
    [memory] = outlook.rounding_check.memory
    assert memory.peak_bytes > next(each.peak_bytes for each in outlook.memory if each.process == "training-path")
    without_check = look_ahead(prepared(folder), tmp_path, ["score-ref-fp64"], 6.0).outlook
    assert without_check is not None
    assert without_check.rounding_check is None
    assert without_check.time.total.likely_seconds == pytest.approx(outlook.time.total.likely_seconds)


@pytest.mark.parametrize(("state", "is_done"), [("skipped", False), ("done", True)])
def test_a_check_of_rounding_that_failed_is_still_to_come(
    tmp_path: Path, folder: Path, state: Literal["skipped", "done"], is_done: bool
) -> None:
    run, check = earlier(tmp_path / "run", folder), "score-ref-fp64"
    edit_manifest(run, lambda manifest: manifest.rounding_checks.append("bf16"))
    edit_manifest(run, lambda manifest: manifest.stages.update({check: StageRecord(state=state)}))
    assert (check in done_stages(run)) == is_done


def test_quantised_weights_have_no_estimate_and_a_reason(tmp_path: Path) -> None:
    strange = make_checkpoint(tmp_path / "strange", "llama")
    config = strange / "config.json"
    values = {**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(values))
    plan = look_ahead(prepared(strange), tmp_path, [], 6.0)
    assert plan.outlook is None
    assert plan.no_outlook_because == "the weights are quantised, and what their kernels take is not known here"
    assert run_clock(prepared(strange), earlier(tmp_path / "run", strange)) is None
