"""The command as CI meets it: exit codes, files, annotations."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mismatch_probe.cli import gate_answers
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.answers import CheckResult, GateResult
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table, write_table
from mismatch_probe.report.answers.gate import passing_text
from mismatch_probe.report.markdown import escape
from mismatch_probe.report.rendering import PlotlyJs, plotly_js_of
from tests.gate.cli import GATE, CommandLine, check, gate_file
from tests.report import samples
from tests.simulated_run import Simulation, edit_manifest, simulated_run

pytestmark = pytest.mark.slow

SMALL = Simulation(num_prompts=32, mean_length=20)
KEPT = check(metric="abs_logprob_diff", max=1)
BROKEN = check(metric="abs_logprob_diff", max=0.0001)
REGRESSION = check(metric="abs_logprob_diff", max_regression=0.1)


def open_check(run: RunDirectory) -> str:
    """A limit right where the value lies."""
    return check(metric="abs_logprob_diff", max=float(f"{mean_deviation(run):.6g}"))


def mean_deviation(run: RunDirectory) -> float:
    from mismatch_probe.difference.samples import read_samples
    from mismatch_probe.stats.metrics import pair_metrics

    pair = read_samples(run, run.read_manifest())[Dtype.BF16, Dtype.BF16].data.pair
    assert pair is not None
    return pair_metrics(pair)[0]["abs_logprob_diff"].value


@pytest.mark.parametrize(
    ("text", "code", "answer"),
    [
        ("[gate]" + KEPT, ExitCode.PASS, "pass"),
        ("[gate]" + BROKEN, ExitCode.GATE_FAILED, "fail"),
        ("[gate]", ExitCode.USAGE, "error"),
        ("open", ExitCode.INCONCLUSIVE, "inconclusive"),
    ],
)
def test_each_answer_has_its_exit_code_and_stands_in_the_file(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path, text: str, code: ExitCode, answer: str
) -> None:
    config = gate_file(tmp_path, "[gate]" + open_check(baseline) if text == "open" else text)
    assert command_line("gate", baseline.path, "--config", config).code == code
    result = GateResult.model_validate_json((baseline.path / "gate.json").read_text())
    assert (result.answer, result.exit_code) == (answer, code)


@pytest.mark.parametrize(
    ("ending", "code"), [(KeyboardInterrupt, ExitCode.INTERRUPTED), (ZeroDivisionError, ExitCode.ENVIRONMENT)]
)
def test_what_ends_before_an_answer_leaves_no_older_one_standing(
    command_line: CommandLine,
    baseline: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: type[BaseException],
    code: ExitCode,
) -> None:
    def ended_early(*_: object, **__: object) -> None:
        raise ending

    outputs = [tmp_path / "copy.xml", tmp_path / "answer.md"]
    words = ("gate", baseline.path, "--config", gate_file(tmp_path, "[gate]" + KEPT))
    words += ("--junit", outputs[0], "--markdown", outputs[1])
    assert command_line(*words).code == ExitCode.PASS
    outputs += [baseline.path / "gate.json", baseline.path / "junit.xml"]
    assert all(path.exists() for path in outputs)
    monkeypatch.setattr(gate_answers, "run_gate", ended_early)
    assert command_line(*words).code == code
    assert all("ended before it had an answer" in path.read_text() for path in outputs)


def test_an_upgrade_that_makes_it_worse_turns_red_and_one_that_does_not_stays_green(
    command_line: CommandLine, baseline: RunDirectory, worse: RunDirectory, tmp_path: Path
) -> None:
    config = gate_file(tmp_path, "[gate]" + REGRESSION)
    same = simulated_run(tmp_path / "same", Simulation(num_prompts=256, vllm="0.33.0"))
    red = command_line("gate", worse.path, "--config", config, "--baseline", baseline.path, "--json")
    green = command_line("gate", same.path, "--config", config, "--baseline", baseline.path, "--json")
    assert (red.code, green.code) == (ExitCode.GATE_FAILED, ExitCode.PASS)
    assert red.document["checks"][0]["comparison"] == "paired"
    assert "changed since the baseline: vllm 0.32.0 -> 0.33.0" in red.document["notes"]


def test_other_responses_are_compared_as_two_samples(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    other = simulated_run(tmp_path / "other", Simulation(num_prompts=256, token_seed=1, noise_seed=1, worse=1.5))
    config = gate_file(tmp_path, "[gate]" + REGRESSION)
    ended = command_line("gate", other.path, "--config", config, "--baseline", baseline.path, "--json")
    assert ended.document["checks"][0]["comparison"] == "two-sample"
    assert ended.code == ExitCode.GATE_FAILED


def test_limits_edited_after_a_look_are_noted(command_line: CommandLine, small: RunDirectory, tmp_path: Path) -> None:
    def notes(limits: str) -> str:
        config = gate_file(tmp_path, "[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\n" + limits)
        return " ".join(command_line("gate", small.path, "--config", config, "--json").document["notes"])

    assert "other limits" not in notes(BROKEN)
    assert "other limits" not in notes(BROKEN)
    assert "this run was judged by other limits before, with 32 sequences" in notes(KEPT)


def test_limits_edited_before_the_first_look_are_not_noted(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    for limits in (BROKEN, KEPT):
        config = gate_file(tmp_path, "[gate]\nmin_sequences = 4096\nmin_prompts = 32\nmax_sequences = 4096\n" + limits)
        answer = command_line("gate", small.path, "--config", config, "--json").document
        assert answer["look"]["number"] == 0
        assert "other limits" not in " ".join(answer["notes"])


def test_a_baseline_made_after_the_run_is_noted(command_line: CommandLine, small: RunDirectory, tmp_path: Path) -> None:
    later = simulated_run(tmp_path / "later", Simulation(num_prompts=32, mean_length=20))
    config = gate_file(tmp_path, "[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\n" + REGRESSION)
    swapped, right = (
        command_line("gate", run.path, "--config", config, "--baseline", other.path).stdout
        for run, other in ((small, later), (later, small))
    )
    assert "the baseline is younger than the run" in swapped
    assert "younger" not in right


def _rescored(run: RunDirectory, path: Path) -> RunDirectory:
    """The same responses scored again, as `diff --rescore` leaves them: mu by prefill, which `run` holds as well."""
    prefill = read_table(simulated_run(path / "other", replace(SMALL, noise_seed=3)).leg_path("infer-bf16-decode"))
    again = simulated_run(path / "again", SMALL)
    again.leg_path("infer-bf16-decode").unlink()
    for directory in (run, again):
        write_table(directory.leg_path("infer-bf16-prefill"), prefill)
    edit_manifest(again, lambda manifest: setattr(manifest.stages["sample-bf16"], "state", "skipped"))
    return again


def test_responses_scored_again_are_compared_with_the_baselines_prefill(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    again = _rescored(small, tmp_path)
    config = gate_file(tmp_path, "[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\n" + REGRESSION)
    ended = command_line("gate", again.path, "--config", config, "--baseline", small.path, "--json")
    [check] = ended.document["checks"]
    assert (check["comparison"], check["value"]) == ("paired", 0.0)
    ended = command_line("gate", small.path, "--config", config, "--baseline", again.path)
    assert (ended.code, "by prefill alone" in ended.stderr) == (ExitCode.USAGE, True), ended


def test_json_is_one_document_and_the_file_holds_the_same(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    ended = command_line("gate", baseline.path, "--config", gate_file(tmp_path, "[gate]" + KEPT), "--json")
    assert ended.document == json.loads((baseline.path / "gate.json").read_text())


def test_every_line_names_the_limit_that_would_pass(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    ended = command_line("gate", baseline.path, "--config", gate_file(tmp_path, "[gate]" + KEPT + BROKEN), "--json")
    assert all("the smallest max that would pass is" in judged["sentence"] for judged in ended.document["checks"])
    limit = ended.document["checks"][0]["sentence"].rpartition(" ")[2]
    again = "[gate]" + check(metric="abs_logprob_diff", max=float(limit))
    assert command_line("gate", baseline.path, "--config", gate_file(tmp_path, again)).code == ExitCode.PASS


def test_junit_has_a_case_a_check_and_shows_what_is_open_as_an_error(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    config = gate_file(tmp_path, "[gate]" + KEPT + BROKEN)
    command_line("gate", baseline.path, "--config", config, "--junit", tmp_path / "copy.xml")
    suite = ElementTree.parse(tmp_path / "copy.xml").getroot()
    assert [len(case.findall("failure")) for case in suite.iter("testcase")] == [0, 1]
    command_line("gate", baseline.path, "--config", gate_file(tmp_path, "[gate]" + open_check(baseline)))
    suite = ElementTree.parse(baseline.path / "junit.xml").getroot()
    assert [case.find("error") is not None for case in suite.iter("testcase")] == [True]


def test_markdown_cannot_be_written_to_by_a_hostile_name(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    hostile = simulated_run(tmp_path / "run", Simulation(num_prompts=256, fingerprint="<img src=x>|[a](b)\n# @you"))
    config = gate_file(tmp_path, "[gate]" + KEPT)
    command_line("gate", hostile.path, "--config", config, "--markdown", tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text()
    assert "\\<img src=x\\>\\|\\[a\\](b)" in text
    assert "\n# " not in text


@pytest.mark.parametrize("name", ["https://a.example/x", "HTTP://a.example", "www.a.example"])
def test_markdown_makes_no_link_of_a_bare_address(name: str) -> None:
    assert name not in escape(name)
    assert escape(name).replace("\\", "") == name


def test_the_table_names_a_limit_that_would_pass(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    config = gate_file(tmp_path, "[gate]" + KEPT + check(metric="prob_pearson", min=0.5))
    result = command_line("gate", baseline.path, "--config", config, "--json").document
    for judged in map(CheckResult.model_validate, result["checks"]):
        shown = float(passing_text(judged))
        assert judged.passing_limit is not None
        assert shown >= judged.passing_limit if judged.kind == "max" else shown <= judged.passing_limit


def test_an_error_reaches_every_output(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    small.leg_path("train-bf16").unlink()
    words = ("--config", gate_file(tmp_path, "[gate]" + KEPT), "--github", "--junit", tmp_path / "out.xml", "--json")
    ended = command_line("gate", small.path, *words)
    assert ended.code == ExitCode.ENVIRONMENT
    assert ended.document["answer"] == "error"
    assert "::error" in ended.stderr
    assert "error" in (tmp_path / "summary.md").read_text()
    assert "<error" in (tmp_path / "out.xml").read_text()


FLOOR = '[gate]\nfloor = "floor.json"\n'


def test_calibration_finds_what_an_unchanged_set_up_shows_and_margins_below_it_are_refused(
    command_line: CommandLine, baseline: RunDirectory, worse: RunDirectory, tmp_path: Path
) -> None:
    again = simulated_run(tmp_path / "again", Simulation(num_prompts=256, noise_seed=2))
    config = gate_file(tmp_path, FLOOR + REGRESSION)
    calibrated = command_line("gate", "calibrate", baseline.path, again.path, "--config", config, "--json")
    assert calibrated.code == ExitCode.PASS
    [entry] = calibrated.document["entries"]
    assert 0 < entry["change"] < 0.1 < 1
    assert entry["same_leg"] > 0.001
    judged = command_line("gate", worse.path, "--config", config, "--baseline", baseline.path)
    assert judged.code == ExitCode.GATE_FAILED
    tight = gate_file(tmp_path, FLOOR + check(metric="abs_logprob_diff", max_regression=entry["change"] / 2))
    refused = command_line("gate", worse.path, "--config", tight, "--baseline", baseline.path)
    assert (refused.code, "below the noise floor" in refused.stderr) == (ExitCode.USAGE, True)


def test_an_absolute_limit_below_the_same_leg_twice_is_refused(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    again = simulated_run(tmp_path / "again", Simulation(num_prompts=256, noise_seed=2))
    config = gate_file(tmp_path, FLOOR + BROKEN)
    command_line("gate", "calibrate", baseline.path, again.path, "--config", config)
    refused = command_line("gate", baseline.path, "--config", config)
    assert (refused.code, "below the noise floor" in refused.stderr) == (ExitCode.USAGE, True)


def test_a_floor_of_another_model_or_without_the_check_is_refused(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    other = [simulated_run(tmp_path / name, Simulation(fingerprint="checkpoint-b")) for name in ("one", "two")]
    config = gate_file(tmp_path, FLOOR + KEPT)
    command_line("gate", "calibrate", *(run.path for run in other), "--config", config)
    assert "another model" in command_line("gate", baseline.path, "--config", config).stderr
    again = simulated_run(tmp_path / "again", Simulation(num_prompts=256, noise_seed=2))
    command_line("gate", "calibrate", baseline.path, again.path, "--config", config)
    more = gate_file(tmp_path, FLOOR + KEPT + check(metric="kl_k2", max=1))
    assert "was never measured" in command_line("gate", baseline.path, "--config", more).stderr


def test_a_run_that_scored_responses_again_has_the_floor_of_a_leg_and_none_of_a_change(
    command_line: CommandLine, tmp_path: Path
) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=256))
    again = simulated_run(tmp_path / "again", Simulation(num_prompts=256, noise_seed=2))
    again.leg_path("train-bf16").rename(run.leg_path("train-bf16-alone"))
    config = gate_file(tmp_path, FLOOR + REGRESSION)
    [entry] = command_line("gate", "calibrate", run.path, "--config", config, "--json").document["entries"]
    assert entry["same_leg"] > 0.001
    assert entry["change"] is None
    judged = command_line("gate", run.path, "--config", config, "--baseline", run.path)
    assert (judged.code, "which shows no change" in judged.stderr) == (ExitCode.USAGE, True)


def test_one_run_or_changed_versions_calibrate_nothing(
    command_line: CommandLine, baseline: RunDirectory, worse: RunDirectory, tmp_path: Path
) -> None:
    config = gate_file(tmp_path, FLOOR + KEPT)
    assert "nothing was computed twice" in command_line("gate", "calibrate", baseline.path, "--config", config).stderr
    changed = command_line("gate", "calibrate", baseline.path, worse.path, "--config", config)
    assert (changed.code, "a change, not a repetition" in changed.stderr) == (ExitCode.USAGE, True)
    nowhere = gate_file(tmp_path, "[gate]" + KEPT)
    assert "names no floor" in command_line("gate", "calibrate", baseline.path, "--config", nowhere).stderr


def test_a_run_directory_may_be_named_as_a_subcommand_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    gate_file(tmp_path, GATE + check(metric="abs_logprob_diff", max=1.0))
    for name in ("run", "calibrate"):
        simulated_run(tmp_path / name, Simulation(num_prompts=32))
        for words in (("gate", name), ("gate", name, "--config", "mismatch.toml"), ("gate", "run", name)):
            ended = command_line(*words)
            assert ended.code == 0, ended
        assert (tmp_path / name / "gate.json").exists()
    assert "Usage" in command_line("gate", "run", "--help").stdout


def test_an_unfinished_run_names_the_whole_command_that_continues_it(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "my run", Simulation(num_prompts=32))
    config = gate_file(tmp_path, GATE + check(metric="abs_logprob_diff", max=1.0))
    (run.path / "legs" / "train-bf16.parquet").unlink()
    command = f"`mismatch-probe compare --resume --out '{run.path}'`"
    ended = command_line("gate", run.path, "--config", config)
    assert (ended.code, command in ended.stderr) == (4, True), ended


def test_the_answer_stands_on_the_page_of_a_run_that_has_one(
    command_line: CommandLine, baseline: RunDirectory, tmp_path: Path
) -> None:
    """Also where the gate refuses: no older answer stands there."""
    baseline.write_summary(samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),))))
    passing = gate_file(tmp_path, "[gate]" + KEPT)
    assert command_line("gate", baseline.path, "--config", passing).code == ExitCode.PASS
    assert not baseline.report_path.exists()
    baseline.report_path.write_text("older")
    for checks, code, words in (
        (KEPT, ExitCode.PASS, "gate: pass"),
        (BROKEN, ExitCode.GATE_FAILED, "gate: fail"),
        ("", ExitCode.USAGE, "gate: error"),
    ):
        assert command_line("gate", baseline.path, "--config", gate_file(tmp_path, "[gate]" + checks)).code == code
        page = baseline.report_path.read_text(encoding="utf-8")
        assert words in page
        assert (page.index('<section id="gate"') > page.index('<section id="verdicts"')) == (code == ExitCode.USAGE)


def test_the_page_keeps_where_it_has_plotly_from(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    words = ("gate", small.path, "--config", gate_file(tmp_path, GATE + KEPT))
    for mode in PlotlyJs:
        command_line("report", small.path, "--recompute", "--plotlyjs", mode)
        assert command_line(*words).code == ExitCode.PASS
        assert plotly_js_of(small.report_path) is mode
        assert 'id="gate"' in small.report_path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_drawn_changes_no_answer(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    words = ("gate", small.path, "--config", gate_file(tmp_path, GATE + KEPT))
    command_line("report", small.path, "--recompute")
    damaged = small.path / "headroom.json"
    damaged.write_text("{")
    ended = command_line(*words)
    damaged.unlink()
    assert ended.code == ExitCode.PASS
    assert GateResult.model_validate_json((small.path / "gate.json").read_text()).answer == "pass"
    assert f"The answer stands, but {small.report_path} could not be drawn with it: " in ended.stderr
    assert "headroom.json" in ended.stderr
    assert f"draw it again with `mismatch-probe report {small.path}`" in ended.stderr


def test_a_gate_on_the_verdict_reads_all_that_the_verdict_rests_on(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    command_line("report", small.path, "--recompute")
    gate = gate_file(tmp_path, GATE.replace("[gate]", '[gate]\nverdict = "error"') + KEPT)
    damaged = small.path / "headroom.json"
    damaged.write_text("{")
    ended = command_line("gate", small.path, "--config", gate)
    damaged.unlink()
    assert ended.code == ExitCode.ENVIRONMENT
    assert "headroom.json" in ended.stderr


def test_a_fault_in_drawing_the_page_takes_no_place_of_what_stopped_the_gate(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line("report", small.path, "--recompute")

    def divides_by_zero(run: RunDirectory) -> Path:
        raise ZeroDivisionError(f"while drawing {run.path}")

    monkeypatch.setattr("mismatch_probe.cli.gate_answers.write_report", divides_by_zero)
    ended = command_line("gate", small.path, "--config", gate_file(tmp_path, "[gate]"))
    assert ended.code == ExitCode.USAGE
    assert f"could not be drawn with it: ZeroDivisionError: while drawing {small.path}" in ended.stderr
