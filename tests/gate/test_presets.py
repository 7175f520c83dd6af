"""The presets `layout`, on metrics of two trainings, and `bitwise`, on whatever a side computed twice."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode, UsageError
from mismatch_probe.gate.config import parse_gate
from mismatch_probe.gate.decide import decide
from mismatch_probe.gate.measure import Evidence, Measurer
from mismatch_probe.gate.run_checks import equality_results, require_batch_invariance
from mismatch_probe.notation import ABSENT
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.answers.gate import checks_table
from mismatch_probe.stats.sequences import Repeat, Sequences, TokenPair
from tests.gate.cli import GOOD, CommandLine, Ended, check, gate_file
from tests.simulated_run import Simulation, simulated_manifest

VERL = {"actor/pg_loss": -0.0134, "actor/grad_norm": 0.213, "actor/entropy": 0.41, "rollout_corr/k3_kl": 4e-4}
PRIME = {"loss/mean": 0.031, "optim/grad_norm": 0.08, "entropy/all/mean": 0.62, "mismatch_kl/all/mean": 2e-3}
SLIME = {"train/loss": 0.02, "train/grad_norm": 1.1, "train/entropy_loss": 0.3, "train/mis_k3_kl": 1e-3}
SKYRL = {"policy/policy_loss": 0.2, "policy/grad_norm": 0.4, "policy/policy_entropy": 0.5}


def metrics(path: Path, values: Mapping[str, float], first_step: int = 1) -> Path:
    """Three steps; the later ones differ wildly, as a training does."""
    lines = [
        {"step": first_step + number, **{name: value * 7**number for name, value in values.items()}}
        for number in range(3)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def judged(
    command_line: CommandLine, folder: Path, run: Mapping[str, float], baseline: Mapping[str, float] = VERL
) -> Ended:
    paths = metrics(folder / "tp2.jsonl", run), metrics(folder / "tp1.jsonl", baseline)
    return command_line("gate", paths[0], "--preset", "layout", "--baseline", paths[1], "--json")


@pytest.mark.parametrize("values", [VERL, PRIME, SLIME])
def test_the_same_first_step_passes(command_line: CommandLine, tmp_path: Path, values: dict[str, float]) -> None:
    ended = judged(command_line, tmp_path, values, values)
    assert (ended.code, ended.document["answer"]) == (ExitCode.PASS, "pass"), ended
    assert [each["value"] for each in ended.document["checks"]] == [0, 0, 0, 0]
    assert "at step 1, the first of both" in ended.document["sentence"]


@pytest.mark.parametrize(
    ("metric", "name", "kept", "broken"),
    [
        ("layout_loss", "actor/pg_loss", -0.0134 * 1.019, -0.0134 * 1.021),
        ("layout_gradient_norm", "actor/grad_norm", 0.213 * 0.981, 0.213 * 0.979),
        ("layout_entropy", "actor/entropy", 0.4109, 0.4111),
        ("layout_kl_k3", "rollout_corr/k3_kl", 1.39e-3, 1.41e-3),
    ],
)
def test_each_metric_beyond_its_limit_fails_alone(
    command_line: CommandLine, tmp_path: Path, metric: str, name: str, kept: float, broken: float
) -> None:
    assert judged(command_line, tmp_path, VERL | {name: kept}).code == ExitCode.PASS
    ended = judged(command_line, tmp_path, VERL | {name: broken})
    assert (ended.code, ended.document["answer"]) == (ExitCode.GATE_FAILED, "fail")
    assert [each["metric"] for each in ended.document["checks"] if each["answer"] == "fail"] == [metric]


def test_a_loss_that_cancels_to_0_is_no_difference_and_one_that_does_not_is(
    command_line: CommandLine, tmp_path: Path
) -> None:
    zero = VERL | {"actor/pg_loss": 3e-9}
    assert judged(command_line, tmp_path, VERL | {"actor/pg_loss": -8e-8}, zero).code == ExitCode.PASS
    assert judged(command_line, tmp_path, VERL | {"actor/pg_loss": 1e-4}, zero).code == ExitCode.GATE_FAILED


def test_a_metric_that_is_in_one_log_alone_is_never_a_pass(command_line: CommandLine, tmp_path: Path) -> None:
    ended = judged(command_line, tmp_path, SKYRL, SKYRL)
    assert ended.code == ExitCode.USAGE
    assert "KL (k3) of step 1 do not stand in both logs" in ended.stderr
    assert "layout_loss, layout_gradient_norm and layout_entropy" in ended.stderr
    three = "".join(check(metric=f"layout_{name}", max=0.01) for name in ("loss", "gradient_norm", "entropy"))
    paths = metrics(tmp_path / "tp2.jsonl", SKYRL), metrics(tmp_path / "tp1.jsonl", SKYRL)
    config = gate_file(tmp_path, f"[gate]\n{three}")
    assert command_line("gate", paths[0], "--config", config, "--baseline", paths[1]).code == ExitCode.PASS


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_number_that_is_not_finite_is_not_judged(command_line: CommandLine, tmp_path: Path, value: str) -> None:
    run = metrics(tmp_path / "tp2.jsonl", VERL | {"actor/grad_norm": float(value)})
    ended = command_line("gate", run, "--preset", "layout", "--baseline", metrics(tmp_path / "tp1.jsonl", VERL))
    assert ended.code == ExitCode.ENVIRONMENT, ended
    assert "not finite" in ended.stderr


def test_what_cannot_be_compared_is_refused(command_line: CommandLine, tmp_path: Path, small: RunDirectory) -> None:
    run, later = metrics(tmp_path / "tp2.jsonl", VERL), metrics(tmp_path / "later.jsonl", VERL, first_step=5)
    for words, sentence in (
        ((run, "--preset", "layout"), "give them with --baseline"),
        ((run, "--preset", "layout", "--baseline", run), "is the run itself"),
        ((run, "--preset", "layout", "--baseline", later), "those of the baseline at step 5"),
        ((run, "--preset", "layout", "--baseline", small.path), "is a comparison"),
        ((run, "--preset", "layouts"), "did you mean 'layout'"),
        ((run, "--preset", "layout", "--config", tmp_path / "my.toml"), "without a gate file"),
        (
            (run, "--config", gate_file(tmp_path, f'[gate]\npreset = "layout"\n{GOOD}'), "--baseline", later),
            "write a gate file for each",
        ),
    ):
        ended = command_line("gate", *words)
        assert ended.code == ExitCode.USAGE, words
        assert sentence in ended.stderr, words


def test_a_preset_alone_judges_a_run_as_the_file_that_names_it(
    command_line: CommandLine, tmp_path: Path, small: RunDirectory
) -> None:
    by_file = command_line("gate", small.path, "--config", gate_file(tmp_path, '[gate]\npreset = "verl"\n'), "--json")
    by_flag = command_line("gate", small.path, "--preset", "verl", "--json")
    assert by_flag.document["checks"] == by_file.document["checks"]
    assert (by_flag.code, by_flag.document["gate_file"]) == (by_file.code, "preset verl")
    assert by_flag.document["next_command"] is None


def pair_computed_twice(**second: np.ndarray) -> Evidence:
    log_probs = -np.linspace(0.1, 3, 40)
    sequences = Sequences.of_lengths(np.full(4, 10))
    repeats = {
        name: Repeat(sequences, log_probs, second.get(name, log_probs)) for name in ("pi_again", "mu_other_batch")
    }
    prefill = second.get("prefill", log_probs)
    pair = TokenPair(sequences, log_pi=log_probs, log_mu=log_probs, log_mu_prefill=prefill, repeats=repeats)
    return Evidence(pair, num_sampled=4)


@pytest.mark.parametrize("name", ["prefill", "pi_again", "mu_other_batch"])
def test_one_bit_in_whatever_was_computed_twice_fails_bitwise(name: str) -> None:
    equal = equality_results({("bf16", "bf16"): pair_computed_twice()})
    assert [each.answer for each in equal] == ["pass"] * 3
    log_probs = -np.linspace(0.1, 3, 40)
    log_probs[7] = np.nextafter(log_probs[7], 0)
    results = equality_results({("bf16", "bf16"): pair_computed_twice(**{name: log_probs})})
    [broken] = [each for each in results if each.answer == "fail"]
    assert "1 of 40 tokens differ" in broken.sentence


@pytest.mark.parametrize("setting", ["extend", "warn", "pass", "fail"])
def test_bitwise_passes_no_run_in_which_nothing_was_computed_twice(setting: str) -> None:
    log_probs = -np.linspace(0.1, 3, 640)
    sequences = Sequences.of_lengths(np.full(64, 10))
    once = TokenPair(sequences, log_pi=log_probs, log_mu=log_probs)
    twice = replace(once, repeats={"pi_again": Repeat(sequences, log_probs, log_probs)})
    gate = parse_gate({"gate": {"preset": "bitwise", "on_inconclusive": setting}}, "gate.toml")
    for pair, answer, code in (
        (once, "inconclusive", ExitCode.GATE_FAILED if setting == "fail" else ExitCode.INCONCLUSIVE),
        (twice, "pass", ExitCode.PASS),
    ):
        evidence = {("bf16", "bf16"): Evidence(pair, num_sampled=64)}
        decision = decide(gate, Measurer(evidence), equality_results(evidence))
        assert (decision.answer, decision.exit_code(gate.settings)) == (answer, code)
        assert [each.is_untested for each in decision.checks] == [False, pair is once]
        assert [ABSENT in map(str, row) for row in checks_table(decision.checks).rows] == [False, pair is once]


def test_the_command_says_that_nothing_was_computed_twice(
    command_line: CommandLine, tmp_path: Path, small: RunDirectory
) -> None:
    for leg in small.path.glob("legs/infer-*-prefill.parquet"):
        leg.unlink()
    ended = command_line("gate", small.path, "--preset", "bitwise")
    assert "neither side computed anything twice" in ended.stdout


def test_bitwise_is_refused_where_the_architecture_chooses_tokens_by_a_sparse_index() -> None:
    model = simulated_manifest(Simulation()).model
    require_batch_invariance(model)
    for architecture in ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"):
        require_batch_invariance(model.model_copy(update={"architecture": architecture}))
    for architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
        with pytest.raises(UsageError, match="sparse index"):
            require_batch_invariance(model.model_copy(update={"architecture": architecture}))


@pytest.mark.slow
def test_the_metrics_of_a_training_run_are_read_in_its_folder(command_line: CommandLine, tmp_path: Path) -> None:
    own = {"optim/loss": 0.1, "optim/grad_norm": 2.0, "policy/entropy": 0.5, "mismatch/kl_k3": 1e-4}
    folders = []
    for name, values in (("one", own), ("two", own | {"optim/grad_norm": 2.1})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "manifest.json").write_text('{"training_version": 1}')
        metrics(folder / "metrics.jsonl", values)
        folders.append(folder)
    ended = command_line("gate", folders[1], "--preset", "layout", "--baseline", folders[0], "--json")
    assert ended.code == ExitCode.GATE_FAILED, ended
    assert [each["answer"] for each in ended.document["checks"]] == ["pass", "fail", "pass", "pass"]
