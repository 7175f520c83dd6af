"""What a run refuses to be continued with, and how it says so."""

from pathlib import Path
from typing import Any, Literal

import pytest

from mismatch_probe.compare import run as run_module
from mismatch_probe.compare.continuation import later_settings
from mismatch_probe.compare.plan import EffectiveSettings, StageStarted
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run import Recorder, execute, resume_run
from mismatch_probe.errors import RunDirectoryError
from mismatch_probe.provenance.environment import content_key, decisive_keys, package_keys
from mismatch_probe.records.manifest import Manifest, StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests.simulated_run import Simulation, edit_manifest, simulated_manifest, simulated_prompts, simulated_run

MADE = Simulation(num_prompts=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_prompts": 3}, r"prompts.num_prompts = 2 \(now 3\)"),
        ({"vllm": "0.99"}, r"vllm = '0.32.0' \(now '0.99'\)"),
        ({"fingerprint": "checkpoint-b"}, "another model content"),
    ],
)
def test_what_changed_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    now = Simulation(**{"num_prompts": 2, **change})
    simulated_run(tmp_path / "run", MADE)
    with pytest.raises(RunDirectoryError, match=f"was made with {words}"):
        resume_run(tmp_path / "run", Preparation(simulated_manifest(now), simulated_prompts(now)))


def test_a_run_of_a_version_that_knew_other_grounds_says_that(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", MADE)
    now = simulated_manifest(MADE)
    newer = now.model_copy(update={"content_keys": now.content_keys | {"versions": "of more packages"}})
    with pytest.raises(RunDirectoryError, match=r"a mismatch-probe \(.*\) that knew other versions"):
        resume_run(tmp_path / "run", Preparation(newer, simulated_prompts(MADE)))


def with_arguments(manifest: Manifest, args: dict[str, Any]) -> Manifest:
    """The manifest of a run with these engine arguments, recorded as they are."""
    engine = manifest.settings.engine.model_copy(update={"args": args})
    settings = manifest.settings.model_copy(update={"engine": engine})
    keys = manifest.content_keys | {"settings": content_key(settings.model_dump(mode="json"))}
    return manifest.model_copy(update={"settings": settings, "content_keys": keys})


def test_a_run_that_kept_the_text_of_a_flag_goes_on_with_the_value_of_a_file(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", MADE)
    run.write_manifest(with_arguments(run.read_manifest(), {"block-size": "32", "gpu_memory_utilization": "0.90"}))
    now = with_arguments(simulated_manifest(MADE), {"block_size": 32, "gpu_memory_utilization": 0.9})
    resume_run(run.path, Preparation(now, simulated_prompts(MADE)))
    assert run.read_manifest().settings.engine.args == {"block_size": 32, "gpu_memory_utilization": 0.9}
    other = with_arguments(simulated_manifest(MADE), {"block_size": 64, "gpu_memory_utilization": 0.9})
    with pytest.raises(RunDirectoryError, match=r"engine.args.block_size = 32 \(now 64\)"):
        resume_run(run.path, Preparation(other, simulated_prompts(MADE)))


def on_other_grounds(manifest: Manifest, **change: dict[str, Any]) -> Manifest:
    """The manifest as another process would have prepared it."""
    parts = {
        name: {**getattr(manifest, name), **change.get(name, {})} for name in ("versions", "hardware", "environment")
    }
    return manifest.model_copy(update={**parts, "content_keys": manifest.content_keys | decisive_keys(**parts)})


def test_another_version_of_the_package_that_brings_the_engine_is_named(tmp_path: Path) -> None:
    def with_package(manifest: Manifest, version: str) -> Manifest:
        packages = {"an-engine": version}
        keys = manifest.content_keys | package_keys(packages)
        return manifest.model_copy(update={"versions": manifest.versions | packages, "content_keys": keys})

    run = simulated_run(tmp_path / "run", MADE)
    run.write_manifest(with_package(run.read_manifest(), "1.0"))
    now = Preparation(with_package(simulated_manifest(MADE), "1.1"), simulated_prompts(MADE))
    with pytest.raises(RunDirectoryError, match=r"was made with an-engine = '1.0' \(now '1.1'\)"):
        resume_run(run.path, now)


@pytest.fixture
def made(tmp_path: Path) -> RunDirectory:
    run = simulated_run(tmp_path / "run", MADE)
    run.write_manifest(on_other_grounds(run.read_manifest(), environment={"OMP_NUM_THREADS": "4"}))
    return run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": {"mismatch-probe": "9.9"}}, r"mismatch-probe = None \(now '9.9'\)"),
        ({"hardware": {"gpus": ["NVIDIA H200"]}}, r"gpus = \[\] \(now \['NVIDIA H200'\]\)"),
        ({"hardware": {"cpu_cores": 3}}, r"cpu_cores = None \(now 3\)"),
        ({"environment": {"OMP_NUM_THREADS": "8"}}, r"OMP_NUM_THREADS = '4' \(now '8'\)"),
        ({"environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}, "VLLM_ATTENTION_BACKEND = None"),
    ],
)
def test_what_can_change_a_number_is_refused_by_its_name(
    made: RunDirectory, change: dict[str, dict[str, Any]], words: str
) -> None:
    now = on_other_grounds(made.read_manifest(), **change)
    before = made.manifest_path.read_bytes()
    with pytest.raises(RunDirectoryError, match=f"was made with {words}"):
        resume_run(made.path, Preparation(now, simulated_prompts(MADE)))
    assert made.manifest_path.read_bytes() == before


def test_what_changes_no_number_is_recorded(made: RunDirectory) -> None:
    now = on_other_grounds(
        made.read_manifest(), hardware={"memory_bytes": 1}, environment={"VLLM_LOGGING_LEVEL": "DEBUG"}
    )
    [taken_up] = resume_run(made.path, Preparation(now, simulated_prompts(MADE))).read_manifest().continued
    assert set(taken_up.changed) == {
        "hardware.memory_bytes = None (now 1)",
        "environment.VLLM_LOGGING_LEVEL = None (now 'DEBUG')",
    }


def test_a_run_that_another_process_writes_is_left_alone(made: RunDirectory) -> None:
    files = {path: path.read_bytes() for path in (made.manifest_path, made.prompts_path)}
    with made.lock(), pytest.raises(RunDirectoryError, match="another process"):
        resume_run(made.path, Preparation(made.read_manifest(), simulated_prompts(Simulation(num_prompts=1))))
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.slow
def test_a_stage_that_was_recorded_whole_before_a_kill_is_done(made: RunDirectory) -> None:
    manifest = made.read_manifest()
    manifest.stages[STAGE].state, manifest.stages[STAGE].batches_done = "running", 0
    made.write_manifest(manifest)
    execute(made, lambda event: None)
    record = made.read_manifest().stages[STAGE]
    assert (record.state, record.batches_done) == ("done", 1)


class _NextJob(Exception):  # noqa: N818 - the end of the test's run
    """Raised where a run would start its next job."""


@pytest.mark.parametrize("is_begun", [True, False])
def test_parts_whose_settings_are_unknown_are_dropped(
    is_begun: bool, made: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed command leaves such parts where its job was ahead: the stage's beginning is not in the manifest."""

    def start_nothing(*_: Any) -> None:
        raise _NextJob

    stage, leg = "score-train-bf16", "train-bf16"
    manifest = made.read_manifest()
    settings = manifest.stages[stage].effective_settings
    manifest.stages[stage] = StageRecord(state="running", batches=2, effective_settings=settings)
    if not is_begun:
        manifest.stages[stage] = StageRecord()
    made.write_manifest(manifest)
    parts = made.parts(stage, (leg,))
    parts.write(0, {leg: read_table(made.leg_path(leg))})
    made.leg_path(leg).unlink()
    monkeypatch.setattr("mismatch_probe.compare.run.run_planned_job", start_nothing)
    with pytest.raises(_NextJob):
        execute(made, lambda event: None)
    assert parts.is_done(0) == is_begun


STAGE = "sample-bf16"
BEGAN = {"dtype": "bf16", "num_threads": 4, "num_kv_blocks": 100}


def went_on(run: RunDirectory, batches_done: int, earlier: StageRecord | None = None, **settings: Any) -> StageRecord:
    """The stage's record once a child has read back BEGAN, changed by `settings`, and starts."""
    recorder = Recorder(run, run.read_manifest(), lambda event: None, {STAGE: earlier} if earlier else {})
    recorder(EffectiveSettings(stage=STAGE, settings=BEGAN | settings))
    recorder(StageStarted(stage=STAGE, batches=2, batches_done=batches_done))
    return run.read_manifest().stages[STAGE]


def test_a_stage_keeps_the_settings_it_began_with_and_notes_what_changes_no_number(made: RunDirectory) -> None:
    assert went_on(made, 0).effective_settings == BEGAN
    record = went_on(made, 1, num_kv_blocks=50)
    assert record.effective_settings == BEGAN
    assert record.later_settings == ["num_kv_blocks = 100 (now 50)"]


def test_a_stage_does_not_go_on_with_other_settings(made: RunDirectory) -> None:
    went_on(made, 0)
    with pytest.raises(RunDirectoryError, match=rf"{STAGE} began with num_threads = 4 \(now 1\)"):
        went_on(made, 1, num_threads=1)
    assert made.read_manifest().stages[STAGE].effective_settings == BEGAN


def test_a_stage_of_which_nothing_is_recorded_begins_anew(made: RunDirectory) -> None:
    went_on(made, 0)
    assert went_on(made, 0, num_threads=1).effective_settings == BEGAN | {"num_threads": 1}


def test_an_extension_runs_as_the_run_it_is_merged_into(made: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="num_threads"):
        went_on(made, 0, StageRecord(effective_settings=BEGAN), num_threads=1)
    assert went_on(made, 0, StageRecord(effective_settings=BEGAN), max_model_len=9).later_settings


def test_the_same_continues(tmp_path: Path) -> None:
    simulated_run(tmp_path / "run", MADE)
    run = resume_run(tmp_path / "run", Preparation(simulated_manifest(MADE), simulated_prompts(MADE)))
    assert run.read_manifest().content_keys == simulated_manifest(MADE).content_keys


def test_a_run_goes_on_with_what_was_prepared_and_not_with_what_its_manifest_says(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", MADE)
    manifest, now = run.read_manifest(), simulated_manifest(MADE)
    model = manifest.model.model_copy(update={"folder": "/of/a/stranger"})
    trusted = manifest.settings.model.model_copy(update={"trust_remote_code": True})
    settings = manifest.settings.model_copy(update={"model": trusted})
    run.write_manifest(manifest.model_copy(update={"model": model, "settings": settings}))
    resume_run(run.path, Preparation(now, simulated_prompts(MADE)))
    found = run.read_manifest()
    assert (found.model, found.settings) == (now.model, now.settings)
    assert not found.settings.model.trust_remote_code


def test_what_a_killed_job_is_advised_to_continue_with_is_no_other_run_and_fewer_tokens_are(tmp_path: Path) -> None:
    assert "--resume --reference-by-layer" in run_module._WHEN_KILLED[False]
    run = simulated_run(tmp_path / "run", MADE)
    layered, shorter = (
        with_value(simulated_manifest(MADE), table, **value)
        for table, value in (("reference", {"by_layer": True}), ("sampling", {"max_new_tokens": 7}))
    )
    run.write_manifest(with_value(run.read_manifest(), "sampling"))
    assert resume_run(run.path, Preparation(layered, simulated_prompts(MADE))).read_manifest().settings == (
        layered.settings
    )
    with pytest.raises(RunDirectoryError, match=r"sampling.max_new_tokens = .* \(now 7\)"):
        resume_run(run.path, Preparation(shorter, simulated_prompts(MADE)))


def with_value(manifest: Manifest, table: str, **value: Any) -> Manifest:
    """The manifest of a run with another value in a table of its settings, and their key."""
    changed = getattr(manifest.settings, table).model_copy(update=value)
    settings = manifest.settings.model_copy(update={table: changed})
    keys = manifest.content_keys | {"settings": content_key(settings.model_dump(mode="json"))}
    return manifest.model_copy(update={"settings": settings, "content_keys": keys})


@pytest.mark.parametrize(("state", "afterwards"), [("skipped", "pending"), ("done", "done")])
def test_a_check_of_rounding_that_failed_is_tried_again_and_no_other(
    tmp_path: Path, state: Literal["skipped", "done"], afterwards: str
) -> None:
    run = simulated_run(tmp_path / "run", MADE)
    edit_manifest(run, lambda manifest: manifest.rounding_checks.append("bf16"))
    records = {"score-ref-fp64": StageRecord(state=state, note="no memory"), STAGE: StageRecord(state="skipped")}
    edit_manifest(run, lambda manifest: manifest.stages.update(records))
    stages = resume_run(run.path, Preparation(simulated_manifest(MADE), simulated_prompts(MADE))).read_manifest().stages
    assert stages["score-ref-fp64"].state == afterwards
    assert stages[STAGE].state == "skipped", "what is left out for another reason stays so"


def test_another_number_of_ranks_is_noted_and_another_number_of_threads_of_each_is_refused() -> None:
    first = {"ranks": {"ranks": 2}, "num_threads": 1}
    later = {**first, "ranks": {"ranks": 4}}
    assert later_settings("score-train-bf16", first, later) == ["ranks.ranks = 2 (now 4)"]
    with pytest.raises(RunDirectoryError, match=r"began with num_threads = 1 \(now 2\): a CPU .* as many cores"):
        later_settings("score-train-bf16", first, {**later, "num_threads": 2})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:0/cuda:1"])
def test_another_number_of_threads_changes_nothing_that_a_gpu_computes(device: str) -> None:
    first = {"device": device, "num_threads": 1}
    assert later_settings("sample-bf16", first, {**first, "num_threads": 8}) == ["num_threads = 1 (now 8)"]
    on_both = {**first, "device": f"cpu/{device}"}
    with pytest.raises(RunDirectoryError, match="num_threads"):
        later_settings("sample-bf16", on_both, {**on_both, "num_threads": 8})


def test_a_stage_begun_before_tensor_parallel_was_recorded_goes_on_and_not_over_two() -> None:
    assert later_settings("score-train-bf16", {"dtype": "bf16"}, {"dtype": "bf16", "tensor_parallel": 1}) == []
    with pytest.raises(RunDirectoryError, match=r"began with tensor_parallel = 1 \(now 2\)"):
        later_settings("score-train-bf16", {"dtype": "bf16"}, {"dtype": "bf16", "tensor_parallel": 2})


def test_a_stage_begun_before_bf16_products_were_recorded_goes_on_where_they_are_native() -> None:
    assert later_settings("score-train-bf16", {"dtype": "bf16"}, {"dtype": "bf16", "bf16_products": "native"}) == []
    with pytest.raises(RunDirectoryError, match=r"began with bf16_products = 'native'"):
        later_settings("score-train-bf16", {"dtype": "bf16"}, {"dtype": "bf16", "bf16_products": "accumulated in fp32"})
