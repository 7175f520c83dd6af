"""A finished run grows by prompts: nothing recorded changes, and it can be read at every moment."""

from dataclasses import replace
from pathlib import Path
from shutil import copyfile

import pytest

from mismatch_probe.compare.derived_runs import FOLDER, extend_run
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run_reader import RunReader
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode, RunDirectoryError
from mismatch_probe.records.manifest import StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests.command_line import FEW, probe
from tests.simulated_run import Simulation, edit_manifest, simulated_manifest, simulated_prompts, simulated_run

SMALL = Simulation(num_prompts=8, mean_length=20, pairs=((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16)))
LARGE = replace(SMALL, num_prompts=20)
LEGS = ("infer-bf16-decode", "train-bf16", "infer-fp16-decode", "train-fp16", "ref-fp32")


def extended(run: RunDirectory, simulation: Simulation) -> None:
    """Extend a run whose extension has been computed already, so that no engine is started."""
    extension = replace(simulation, first_prompt=read_table(run.prompts_path).num_rows)
    simulated_run(run.path / FOLDER, extension)
    extend_run(run, Preparation(simulated_manifest(simulation), simulated_prompts(simulation)), lambda event: None)


def logprobs(run: RunDirectory, leg: str) -> dict[str, list[float]]:
    table = read_table(run.leg_path(leg))
    return dict(zip(table["id"].to_pylist(), table["logprobs"].to_pylist(), strict=True))


@pytest.mark.slow
def test_an_extended_run_is_the_run_that_was_made_in_one_go(tmp_path: Path) -> None:
    run, complete_run = (
        simulated_run(tmp_path / "run", SMALL),
        simulated_run(tmp_path / "whole", LARGE, with_summary=True),
    )
    extended(run, LARGE)
    for leg in LEGS:
        assert logprobs(run, leg) == logprobs(complete_run, leg)
    assert read_table(run.prompts_path).equals(read_table(complete_run.prompts_path))
    grown, made = run.read_summary().pairs, complete_run.read_summary().pairs
    assert [pair.counts for pair in grown] == [pair.counts for pair in made]
    for one, other in zip(grown, made, strict=True):
        assert one.metrics["abs_logprob_diff"].value == pytest.approx(other.metrics["abs_logprob_diff"].value)


@pytest.mark.slow
def test_the_manifest_says_what_happened_and_the_extension_is_gone(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    extended(run, LARGE)
    manifest = run.read_manifest()
    assert manifest.extended_from == [8]
    assert manifest.settings.prompts.num_prompts == 20
    assert manifest.stages["sample-bf16"].batches == 2
    assert not (run.path / FOLDER).exists()


@pytest.mark.slow
def test_an_extended_run_forgets_what_was_measured_of_rounding_on_fewer_prompts(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    copyfile(run.leg_path("ref-fp32"), run.leg_path("ref-fp64"))
    edit_manifest(run, lambda manifest: manifest.rounding_checks.append("bf16"))
    edit_manifest(run, lambda manifest: manifest.stages.update({"score-ref-fp64": StageRecord(state="done")}))
    extended(run, LARGE)
    manifest = run.read_manifest()
    assert (manifest.rounding_checks, "score-ref-fp64" in manifest.stages) == ([], False)
    assert not run.leg_path("ref-fp64").exists()
    assert len(logprobs(run, "ref-fp32")) == 40


@pytest.mark.slow
def test_a_run_that_kept_the_text_of_a_flag_grows_with_the_value_of_a_file(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    edit_manifest(run, lambda manifest: manifest.settings.engine.args.update({"block_size": "32"}))
    now = simulated_manifest(LARGE)
    simulated_run(run.path / FOLDER, replace(LARGE, first_prompt=SMALL.num_prompts))
    now.settings.engine.args["block_size"] = 32
    extend_run(run, Preparation(now, simulated_prompts(LARGE)), lambda event: None)
    assert run.read_manifest().settings.prompts.num_prompts == 20


@pytest.mark.slow
def test_a_run_grows_more_than_once(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    extended(run, LARGE)
    extended(run, replace(SMALL, num_prompts=30))
    assert run.read_manifest().extended_from == [8, 20]
    assert run.read_summary().pairs[0].counts.num_sequences == 30


@pytest.mark.slow
def test_a_merge_that_was_interrupted_leaves_a_run_that_reads_and_is_merged_once(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    extension = simulated_run(run.path / FOLDER, replace(LARGE, first_prompt=8))
    complete_run = simulated_run(tmp_path / "whole", LARGE)
    complete_run.leg_path("train-bf16").replace(run.leg_path("train-bf16"))
    assert RunReader(run, run.read_manifest()).pair(("bf16", "bf16")).counts.num_sequences == 8
    extend_run(run, Preparation(extension.read_manifest(), simulated_prompts(LARGE)), lambda event: None)
    assert read_table(run.leg_path("train-bf16")).num_rows == 20
    assert run.read_summary().pairs[0].counts.num_sequences == 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "checkpoint-b"}, "other model"),
        ({"vllm": "0.33.0"}, "other package versions"),
        ({"samples_per_prompt": 2}, "other settings"),
    ],
)
def test_a_run_is_not_extended_by_something_else(tmp_path: Path, change: dict[str, object], words: str) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    other = replace(LARGE, **change)  # type: ignore[arg-type]
    with pytest.raises(RunDirectoryError, match=words):
        extend_run(run, Preparation(simulated_manifest(other), simulated_prompts(other)), lambda event: None)


def test_a_run_is_not_extended_by_prompts_that_do_not_begin_with_its_own(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    prompts = list(reversed(simulated_prompts(LARGE)))
    with pytest.raises(RunDirectoryError, match="other prompts"):
        extend_run(run, Preparation(simulated_manifest(LARGE), prompts), lambda event: None)


@pytest.mark.slow
def test_compare_with_a_gate_extends_the_run_while_the_answer_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit far away is kept at the first look; one right at the value stays open until the last look."""
    config = tmp_path / "mismatch.toml"
    words = ["compare", "--model", "demo", "--dtype", "bf16", "--config", FEW, "--out", "run"]
    words += ["--prompts", "sums:easy", "--max-new-tokens", "8", "--num-prompts", "4", "--gate", str(config)]
    config.write_text(_gate(1.0))
    monkeypatch.chdir(tmp_path)
    probe(*words, code=ExitCode.PASS)
    run = RunDirectory(tmp_path / "run")
    assert run.read_summary().pairs[0].counts.num_sequences == 8
    before = logprobs(run, "train-bf16")
    config.write_text(_gate(run.read_summary().pairs[0].metrics["abs_logprob_diff"].value))
    second = probe(*words, "--resume")
    assert second.returncode in (0, 1, 3), second
    assert run.read_manifest().extended_from[:1] == [8]
    assert logprobs(run, "train-bf16").items() >= before.items()


def _gate(limit: float) -> str:
    settings = "[gate]\nmin_sequences = 8\nmin_prompts = 8\nmax_sequences = 16\n"
    return f'{settings}[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = {limit}\n'


@pytest.mark.slow
@pytest.mark.parametrize(("recorded", "is_extended"), [({}, True), ({"cpu_instructions": "avx2"}, False)])
def test_a_run_of_other_instruction_sets_is_not_extended_and_one_that_records_none_is(
    tmp_path: Path, recorded: dict[str, str], *, is_extended: bool
) -> None:
    run = simulated_run(tmp_path / "run", SMALL)
    manifest = simulated_manifest(LARGE)
    edit_manifest(run, lambda old: old.hardware.update(recorded))
    now = manifest.model_copy(update={"hardware": manifest.hardware | {"cpu_instructions": "avx2, avx512f"}})
    simulated_run(run.path / FOLDER, replace(LARGE, first_prompt=8))
    preparation = Preparation(now, simulated_prompts(LARGE))
    if is_extended:
        extend_run(run, preparation, lambda event: None)
    else:
        with pytest.raises(RunDirectoryError, match="other instruction sets"):
            extend_run(run, preparation, lambda event: None)
