"""What a newcomer types ends in an answer: `compare` by default, then the gate file that `init` writes."""

import re
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.cli.first_steps import starter_path
from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.gate.config import GateSettings, as_preset, load_gate, preset_checks
from mismatch_probe.records.answers import GateResult
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import FEW as FEW_LOOKS
from tests.command_line import probe
from tests.gate.cli import CommandLine, check, gate_file
from tests.simulated_run import Simulation, edit_leg, simulated_run

PAIRS = tuple((dtype, dtype) for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32))
STARTER = starter_path("gate")
FEW = Simulation(num_prompts=32, mean_length=20, pairs=PAIRS)


def test_the_first_look_is_what_compare_samples_by_default() -> None:
    assert load_gate(STARTER).settings.looks == [DEFAULT_NUM_PROMPTS, 128, 256, 512, 1024]
    assert GateSettings().looks == load_gate(STARTER).settings.looks
    assert GateSettings().min_prompts == DEFAULT_NUM_PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize(("times", "code"), [(1.0, ExitCode.PASS), (100.0, ExitCode.GATE_FAILED)])
def test_a_default_run_ends_in_pass_or_where_a_mismatch_is_planted_in_fail(
    tmp_path: Path, command_line: CommandLine, times: float, code: ExitCode
) -> None:
    run = simulated_run(tmp_path / "run", Simulation(pairs=PAIRS, worse=times))
    ended = command_line("gate", run.path, "--config", STARTER)
    assert ended.code == code, ended.stdout
    answer = GateResult.model_validate_json((run.path / "gate.json").read_text())
    assert answer.look is not None
    assert (answer.look.number, answer.look.num_sequences) == (1, DEFAULT_NUM_PROMPTS)


@pytest.mark.slow
def test_the_demo_passes_and_a_planted_mismatch_fails(tmp_path: Path) -> None:
    """64 real responses, short ones. What is planted: the training path's log-probs are 0.3 nats too low."""
    sampled = ["--prompts", "sums:easy", "--max-new-tokens", "12"]
    words = ["--model", "demo", "--dtype", "bf16", *sampled, "--config", FEW_LOOKS]
    run = RunDirectory(tmp_path / "run")
    probe("compare", *words, "--out", run.path, "--gate", STARTER, code=ExitCode.PASS)
    edit_leg(run, "train-bf16", lower)
    probe("report", run.path, "--recompute")
    assert "Fail: 1 limit is broken with 64 sequences" in probe("gate", run.path, "--config", STARTER).stdout


def lower(columns: dict[str, object]) -> None:
    rows = columns["logprobs"]
    assert isinstance(rows, list)
    columns["logprobs"] = [(np.asarray(row) - 0.3).tolist() for row in rows]


@pytest.mark.slow
def test_a_limit_of_the_file_is_counted_once_and_its_pairs_beside_it(tmp_path: Path, command_line: CommandLine) -> None:
    """Before: "3 limits are kept", of a file that has one."""
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=64, pairs=PAIRS))
    kept = command_line("gate", run.path, "--config", STARTER)
    assert "Pass: 1 limit is kept by 3 pairs with 64 sequences" in kept.stdout
    two = "".join(f'[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = {limit}\n' for limit in (1.0, 1e-3))
    broken = command_line("gate", run.path, "--config", gate_file(tmp_path, two))
    assert "Fail: 1 of 2 limits is broken by 2 of 3 pairs with 64 sequences" in broken.stdout


@pytest.mark.slow
def test_a_gate_that_does_not_judge_the_kl_says_whose_yardstick_is_whose(
    tmp_path: Path, command_line: CommandLine
) -> None:
    run = simulated_run(tmp_path / "run", FEW)
    note = "NeMo-RL's limit, by which pages and headlines judge, is one on the KL (0.001 nats a token)"
    assert note in command_line("gate", run.path, "--config", STARTER).stdout
    of_kl = gate_file(tmp_path, '[gate]\npreset = "nemo-rl"\n')
    assert note not in command_line("gate", run.path, "--config", of_kl).stdout


@pytest.mark.slow
def test_checks_that_wait_for_the_same_thing_have_one_sentence(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "run", FEW)
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, '[gate]\npreset = "nemo-rl"\n'))
    assert ended.code == ExitCode.INCONCLUSIVE
    [sentence] = [line for line in ended.stdout.splitlines() if line.startswith("inconclusive")]
    assert sentence == (
        "inconclusive: token_mult_prob_error (clip 5) of BF16, FP16 and FP32; kl_k3 (clip 5) of BF16, FP16 and FP32: "
        "the first look takes 64 sequences, and there are 32"
    )
    assert "before the first look" in ended.stdout


@pytest.mark.slow
def test_a_metric_with_two_limits_names_its_pair_once(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "run", FEW)
    limits = check(metric="kl_k1", max=0.1) + check(metric="kl_k1", min=-0.1)
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, f"[gate]{limits}"))
    assert "inconclusive: kl_k1 of BF16, FP16 and FP32: the first look takes" in ended.stdout


@pytest.mark.slow
def test_checks_that_wait_for_different_things_have_a_sentence_each(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=64))
    probed = command_line("gate", run.path, "--config", STARTER, "--json").document
    mean = check(metric="abs_logprob_diff", max=probed["checks"][0]["value"])
    long = check(metric="abs_logprob_diff", max=1, slice={"length": "60:"})
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, f"[gate]{mean}{long}"))
    assert ended.code == ExitCode.INCONCLUSIVE
    assert len(re.findall(r"^inconclusive: ", ended.stdout, re.MULTILINE)) == 2
    assert "64 sequences do not decide it" in ended.stdout
    assert "fewer than the 64 that a pass needs" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "is_mixed"), [("verl", True), ("nemo-rl", False)])
def test_a_preset_says_which_rows_block(tmp_path: Path, command_line: CommandLine, preset: str, is_mixed: bool) -> None:
    run = simulated_run(tmp_path / "run", Simulation())
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, f'[gate]\npreset = "{preset}"\n'))
    header, *rows = ended.stdout.splitlines()[: 1 + len(preset_checks(as_preset(preset)))]
    assert ("blocks" in header) == is_mixed
    if is_mixed:
        blocking = [limit.level == "error" for limit in preset_checks(as_preset(preset))]
        assert [" yes " in row for row in rows] == blocking
