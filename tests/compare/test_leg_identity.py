"""A leg says whose it is: another's under its name is broken data, in every reader, and never a pass."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch_probe.compare.derived_runs import FOLDER, extend_run
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.legs import Legs
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table, write_table
from tests.gate.cli import CommandLine, check, gate_file
from tests.simulated_run import Simulation, simulated_manifest, simulated_prompts, simulated_run

SMALL = Simulation(num_prompts=32, mean_length=20, run_key="first")
GATE = "[gate]\nmin_sequences = 32\nmax_sequences = 32\nmin_prompts = 16\n" + check(
    metric="abs_logprob_diff", max=100.0
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", SMALL, with_summary=True)


def refused_everywhere(run: RunDirectory, command_line: CommandLine, words: str) -> None:
    folder = run.path.parent
    for command in (
        ("gate", run.path, "--config", gate_file(folder, GATE)),
        ("diff", run.path, run.path),
        ("report", run.path, "--recompute"),
    ):
        ended = command_line(*command)
        assert (ended.code, words in ended.stderr) == (4, True), (command, ended.stderr)


def test_a_run_whose_legs_are_its_own_passes(run: RunDirectory, command_line: CommandLine) -> None:
    ended = command_line("gate", run.path, "--config", gate_file(run.path.parent, GATE))
    assert ended.code == 0, ended


def test_the_engines_leg_in_the_place_of_the_training_paths_is_found_out(
    run: RunDirectory, command_line: CommandLine
) -> None:
    shutil.copy(run.leg_path("infer-bf16-decode"), run.leg_path("train-bf16"))
    refused_everywhere(run, command_line, "train-bf16.parquet is the leg infer-bf16-decode, not train-bf16")


def test_another_runs_leg_is_found_out(run: RunDirectory, command_line: CommandLine, tmp_path: Path) -> None:
    other = simulated_run(tmp_path / "other", replace(SMALL, run_key="second"))
    shutil.copy(other.leg_path("train-bf16"), run.leg_path("train-bf16"))
    refused_everywhere(run, command_line, "train-bf16.parquet is the leg train-bf16 of another run (second)")


def test_a_leg_that_says_nothing_among_legs_that_do_is_found_out(run: RunDirectory, command_line: CommandLine) -> None:
    table = read_table(run.leg_path("infer-bf16-decode"))
    write_table(run.leg_path("train-bf16"), table.replace_schema_metadata(None))
    refused_everywhere(run, command_line, "does not say which leg of which run it is")


@pytest.mark.parametrize("name", ["train-bf16-alone", "full-bf16-bf16"])
def test_closer_looks_are_no_exception(run: RunDirectory, command_line: CommandLine, name: str) -> None:
    shutil.copy(run.leg_path("train-bf16"), run.leg_path(name))
    ended = command_line("report", run.path, "--recompute")
    assert (ended.code, f"{name}.parquet is the leg train-bf16" in ended.stderr) == (4, True), ended


def equal_legs(run: RunDirectory, leg: str, of: str) -> None:
    key = run.read_manifest().run_key
    Legs(run, key).write(leg, Legs(run, key).read(of))


@pytest.mark.slow
def test_a_copy_in_a_run_of_an_earlier_version_is_broken_data_and_never_a_pass(
    tmp_path: Path, command_line: CommandLine
) -> None:
    run = simulated_run(tmp_path / "run", replace(SMALL, run_key=""), with_summary=True)
    gate = gate_file(tmp_path, GATE)
    assert command_line("gate", run.path, "--config", gate).code == 0
    shutil.copy(run.leg_path("infer-bf16-decode"), run.leg_path("train-bf16"))
    ended = command_line("gate", run.path, "--config", gate)
    assert (ended.code, "the same log-probs on both sides, bit for bit" in ended.stderr) == (4, True), ended
    assert command_line("report", run.path, "--recompute").code == 4
    verdict = run.read_summary().pairs[0].verdict
    assert (verdict.kind, verdict.code) == ("broken", "copied_leg")


@pytest.mark.slow
def test_sides_that_are_equal_and_say_whose_they_are_are_believed_and_it_is_said(
    run: RunDirectory, command_line: CommandLine
) -> None:
    equal_legs(run, "train-bf16", "infer-bf16-decode")
    [pair] = summarise(run, run.read_manifest()).pairs
    assert pair.verdict.kind == "clean"
    assert "equal bit for bit" in pair.verdict.evidence[-1]
    assert "computed by its own side" in pair.verdict.evidence[-1]
    assert command_line("gate", run.path, "--config", gate_file(run.path.parent, GATE)).code == 0


@pytest.mark.slow
def test_fp32_sides_that_are_equal_in_an_earlier_version_are_believed_and_what_they_lack_is_said(
    tmp_path: Path,
) -> None:
    run = simulated_run(tmp_path / "run", replace(SMALL, pairs=((Dtype.FP32, Dtype.FP32),), run_key=""))
    equal_legs(run, "train-fp32", "infer-fp32-decode")
    [pair] = summarise(run, run.read_manifest()).pairs
    assert pair.verdict.kind == "clean"
    assert "one may be a copy" in pair.verdict.evidence[-1]


@pytest.mark.slow
def test_an_extended_runs_legs_are_its_own(run: RunDirectory, command_line: CommandLine) -> None:
    large = replace(SMALL, num_prompts=40)
    extension = replace(large, first_prompt=32, run_key="of the extension")
    simulated_run(run.path / FOLDER, extension)
    extend_run(run, Preparation(simulated_manifest(large), simulated_prompts(large)), lambda event: None)
    assert Legs(run, "first").read("train-bf16").num_rows == 40
    assert run.read_manifest().run_key == "first"
    with pytest.raises(BrokenRecord, match=r"is the leg train-bf16 of another run \(first\)"):
        Legs(run, "of the extension").read("train-bf16")
