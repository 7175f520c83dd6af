"""A gate and a diff judge an imported log."""

import json
from pathlib import Path

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.importing.scoring import logged_responses
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import probe
from tests.importing.imported import imported
from tests.importing.logs import log_of_levels, row, rows, write
from tests.logs.choices import rows_of, with_experts, with_sets
from tests.logs.turns import conversation, without_thinking


@pytest.mark.slow
def test_a_gate_and_a_diff_read_an_imported_run(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", rows(600))
    run = imported(tmp_path, log)
    gate = tmp_path / "gate.toml"
    for limit, code in ((1.0, ExitCode.PASS), (0.001, ExitCode.GATE_FAILED)):
        gate.write_text(f'[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = {limit}\n')
        answer = probe("gate", "run", run.path, "--config", gate)
        assert answer.returncode == code, answer
    probe("diff", run.path, run.path, code=ExitCode.PASS)


@pytest.mark.slow
def test_a_gate_judges_single_steps_of_a_log(tmp_path: Path) -> None:
    written = [row(number, step=number // 400) for number in range(800)]
    for one in written[400:]:
        one["train_logprobs"] = [value - 0.5 for value in one["train_logprobs"]]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    gate = tmp_path / "gate.toml"
    for steps, code in (("0:1", ExitCode.PASS), ("1:", ExitCode.GATE_FAILED), ("2:", ExitCode.USAGE)):
        check = f'metric = "abs_logprob_diff"\nmax = 0.1\nslice = {{ step = "{steps}" }}\n'
        gate.write_text(f"[[gate.check]]\n{check}")
        answer = probe("gate", "run", run.path, "--config", gate)
        assert answer.returncode == code, answer
    assert "steps 0 to 1" in answer.stderr


@pytest.mark.slow
def test_a_gate_refuses_a_log_whose_numbers_mean_nothing(tmp_path: Path) -> None:
    """Each number of a shifted column is a log-prob that could be, and the limit is far above the deviation."""
    written = rows(600)
    for one in written:
        one["train_logprobs"] = [*one["train_logprobs"][1:], -1.0]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.ENVIRONMENT)
    gate = tmp_path / "gate.toml"
    gate.write_text('[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 100.0\n')
    answer = probe("gate", "run", run.path, "--config", gate, code=ExitCode.ENVIRONMENT)
    assert "one token too early" in answer.stderr
    assert "fix the log and import it again" in answer.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacking", "code"), [(1, ExitCode.PASS), (3, ExitCode.INCONCLUSIVE), (20, ExitCode.ENVIRONMENT)]
)
def test_a_gate_passes_with_few_tokens_missing_and_never_with_many(
    tmp_path: Path, lacking: int, code: ExitCode
) -> None:
    written = rows(600)
    for one in written:
        one["logprobs"][4 : 4 + lacking] = [None] * lacking
    wanted = ExitCode.ENVIRONMENT if code == ExitCode.ENVIRONMENT else ExitCode.PASS
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=wanted)
    gate = tmp_path / "gate.toml"
    gate.write_text('[gate]\non_inconclusive = "pass"\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 1.0\n')
    answer = probe("gate", "run", run.path, "--config", gate)
    assert answer.returncode == code, answer


@pytest.mark.slow
@pytest.mark.parametrize("responses", [24, 600])
def test_an_undecided_gate_on_a_log_does_not_advise_to_sample_more(tmp_path: Path, responses: int) -> None:
    """The first has too few responses for a look, the second too few prompts for a pass."""
    written = [one | {"prompt_token_ids": [1, number % 20]} for number, one in enumerate(rows(responses))]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    gate = tmp_path / "gate.toml"
    gate.write_text('[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 1.0\n')
    answer = probe("gate", "run", run.path, "--config", gate, code=ExitCode.INCONCLUSIVE)
    assert "import a log with" in answer.stdout
    assert "compare --resume" not in answer.stdout


GROWING = tuple(0.0003 * 2.2**step for step in range(8))


@pytest.mark.slow
def test_a_kl_that_grows_below_the_limit_is_not_passed_in_silence(tmp_path: Path) -> None:
    """Before: "Pass: 1 limit is kept"."""
    run = imported(tmp_path, log_of_levels(tmp_path / "log.jsonl", GROWING))
    gate = tmp_path / "gate.toml"
    for growth, code in (("warn", ExitCode.PASS), ("error", ExitCode.GATE_FAILED), ("off", ExitCode.PASS)):
        gate.write_text(f'[gate]\ngrowth = "{growth}"\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 0.2\n')
        answer = probe("gate", "run", run.path, "--config", gate, "--json", code=code)
        checks = {check["measured"]: check["answer"] for check in json.loads(answer.stdout)["checks"]}
        assert checks["abs_logprob_diff"] == "pass"
        assert checks.get("growth over steps") == (None if growth == "off" else "fail")
        assert ("KL per token grew " in json.loads(answer.stdout)["sentence"]) == (growth == "warn")


@pytest.mark.slow
@pytest.mark.parametrize(("responses", "is_judged"), [(16, True), (1, False)])
def test_a_flat_log_has_a_row_that_says_so_or_a_note_that_it_was_not_judged(
    tmp_path: Path, responses: int, is_judged: bool
) -> None:
    run = imported(tmp_path, log_of_levels(tmp_path / "log.jsonl", (0.01, 0.012, 0.011, 0.013), responses))
    gate = tmp_path / "gate.toml"
    gate.write_text('[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 0.2\n')
    shown = probe("gate", "run", run.path, "--config", gate).stdout
    assert ("none shown" in shown) == is_judged
    assert ("growth of the KL over the steps was not judged" in shown) != is_judged


TURNS_GATE = '[gate]\nmin_sequences = 32\nmax_sequences = 32\n[[gate.check]]\nmetric = "log_broken_turns"\nmax = 0.1\n'


@pytest.mark.slow
@pytest.mark.parametrize("num_broken", [0, 1, 8])
def test_a_gate_limits_turns_that_break_the_prefix_without_the_trainers_side(tmp_path: Path, num_broken: int) -> None:
    run = imported(tmp_path, log_of_turns(tmp_path / "log.jsonl", num_broken), code=ExitCode.INCONCLUSIVE)
    gate = tmp_path / "gate.toml"
    gate.write_text(TURNS_GATE)
    code = ExitCode.GATE_FAILED if num_broken == 8 else ExitCode.PASS
    answer = json.loads(probe("gate", run.path, "--config", gate, "--json", code=code).stdout)
    [check] = answer["checks"]
    assert check["metric"] == "log_broken_turns"
    assert (check["value"] > 0) == (num_broken > 0)
    assert any("do not begin with the prompt" in note for note in answer["notes"]) == (num_broken > 0)


@pytest.mark.slow
def test_a_gate_on_turns_refuses_what_has_none(tmp_path: Path) -> None:
    run = imported(tmp_path, write(tmp_path / "log.jsonl", rows(40)))
    gate = tmp_path / "gate.toml"
    gate.write_text(TURNS_GATE)
    answer = probe("gate", run.path, "--config", gate, code=ExitCode.USAGE)
    assert "no trajectory of the log" in answer.stderr


@pytest.mark.slow
def test_a_gate_on_turns_and_on_a_pair_needs_the_pair(tmp_path: Path) -> None:
    run = imported(tmp_path, log_of_turns(tmp_path / "log.jsonl", 0), code=ExitCode.INCONCLUSIVE)
    gate = tmp_path / "gate.toml"
    gate.write_text(f'{TURNS_GATE}[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 1.0\n')
    answer = probe("gate", run.path, "--config", gate, code=ExitCode.ENVIRONMENT)
    assert "score" in answer.stderr


def log_of_turns(path: Path, num_broken: int) -> Path:
    """Ten trajectories of four turns, of which so many drop their thinking."""
    trajectories = [conversation(number, without_thinking if number < num_broken else None) for number in range(10)]
    return write(
        path,
        [
            {
                "prompt_token_ids": prompt,
                "token_ids": completion,
                "logprobs": [-0.5 - 0.01 * place for place in range(len(completion))],
                "trajectory": number,
            }
            for number, turns in enumerate(trajectories)
            for prompt, completion in turns
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_broken", [0, 2])
def test_turns_behind_a_break_are_written_as_a_trainer_has_them(tmp_path: Path, num_broken: int) -> None:
    log = log_of_turns(tmp_path / "log.jsonl", num_broken)
    answer = probe("import", log, "--out", tmp_path / "run", code=ExitCode.INCONCLUSIVE)
    joined = tmp_path / "run" / "joined"
    assert joined.exists() == (num_broken > 0) == ("What that costs" in answer.stdout)
    if num_broken:
        run = RunDirectory(tmp_path / "joined-run")
        probe("import", joined, "--out", run.path, code=ExitCode.INCONCLUSIVE)
        origin = run.read_manifest().log
        assert origin.num_responses == 3 * num_broken
        assert origin.turns.num_broken == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_broken", [0, 2])
def test_an_answer_names_the_turns_that_its_verdict_does_not_count(tmp_path: Path, num_broken: int) -> None:
    responses = [json.loads(line) for line in log_of_turns(tmp_path / "mu.jsonl", num_broken).read_text().splitlines()]
    both_sides = [each | {"train_logprobs": [mu - 0.01 for mu in each["logprobs"]]} for each in responses]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", both_sides))
    answer = probe("report", run.path)
    for text in (answer.stdout, run.report_path.read_text()):
        assert ("a trainer that joins the turns scores them" in text) == (num_broken > 0)
    assert (f"import {run.path}/joined --model CHECKPOINT" in answer.stdout) == (num_broken > 0)


def choices_gate(metric: str, least: float) -> str:
    return f'[gate]\nmin_sequences = 8\nmax_sequences = 8\n[[gate.check]]\nmetric = "{metric}"\nmin = {least}\n'


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 30])
def test_a_gate_limits_what_can_be_replayed(tmp_path: Path, lost: int) -> None:
    written = rows_of(with_experts(1, responses=12))
    for one in written:
        for place in range(lost):
            one["routed_experts"][11 + place] = None
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.INCONCLUSIVE)
    gate = tmp_path / "gate.toml"
    gate.write_text(choices_gate("log_expert_coverage", 0.9))
    code = ExitCode.GATE_FAILED if lost == 30 else ExitCode.PASS
    answer = json.loads(probe("gate", run.path, "--config", gate, "--json", code=code).stdout)
    [check] = answer["checks"]
    assert check["value"] == pytest.approx(1 - lost / 60)
    assert any("experts are missing" in note for note in answer["notes"]) == (lost > 0)
    gate.write_text(choices_gate("log_kept_agreement", 0.9))
    assert "records no sets" in probe("gate", run.path, "--config", gate, code=ExitCode.USAGE).stderr
    gate.write_text(choices_gate("log_expert_agreement", 0.9))
    assert "explain RUN" in probe("gate", run.path, "--config", gate, code=ExitCode.USAGE).stderr


@pytest.mark.slow
def test_a_gate_limits_sets_that_do_not_hold_their_token(tmp_path: Path) -> None:
    written = rows_of(with_sets(1, responses=12))
    written[0]["token_ids"][:12] = [299_999] * 12
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), code=ExitCode.INCONCLUSIVE)
    gate = tmp_path / "gate.toml"
    for least, code in ((0.97, ExitCode.PASS), (0.99, ExitCode.GATE_FAILED)):
        gate.write_text(choices_gate("log_kept_agreement", least))
        probe("gate", run.path, "--config", gate, code=code)


@pytest.mark.parametrize("num_mixed", [0, 1, 6])
def test_a_gate_limits_responses_whose_weights_change_and_the_run_keeps_their_parts(
    tmp_path: Path, num_mixed: int
) -> None:
    written = [row(number, step=1) for number in range(12)]
    for number, one in enumerate(written):
        spans = [["7", 0, 10], ["8", 10, 30]] if number < num_mixed else [["8", 0, 30]]
        one["weight_versions"] = spans
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    again = imported(tmp_path / "again", run.path / "log")
    for each in (run, again):
        versions = each.read_manifest().log.versions
        assert (versions.num_mixed, versions.num_recorded) == (num_mixed, 12)
        responses = logged_responses(each, None, 12)
        assert [response.weight_spans for response in responses[:1]] == [
            (("7", 10), ("8", 30)) if num_mixed else (("8", 30),)
        ]
    gate = tmp_path / "gate.toml"
    gate.write_text(choices_gate("log_mixed_versions", 0.9).replace("min = 0.9", "max = 0.2"))
    code = ExitCode.GATE_FAILED if num_mixed == 6 else ExitCode.PASS
    answer = json.loads(probe("gate", run.path, "--config", gate, "--json", code=code).stdout)
    assert answer["checks"][0]["value"] == pytest.approx(num_mixed / 12)
    gate.write_text(choices_gate("log_version_misfit", 0.9))
    assert "--weights" in probe("gate", run.path, "--config", gate, code=ExitCode.USAGE).stderr
