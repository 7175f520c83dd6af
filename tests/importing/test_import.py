"""`import`: the numbers of a log arrive as they were written, and what it lacks is said."""

import os
import signal
from pathlib import Path

import numpy as np
import pyarrow.dataset as dataset
import pytest

from mismatch_probe.cli import progress
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.log_readings import VersionReading
from mismatch_probe.records.manifest import LogOrigin
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import run_answer
from tests.command_line import probe
from tests.halts import wait_until
from tests.importing.imported import imported, pair_of
from tests.importing.logs import NOISE, mean_abs, row, rows, write
from tests.simulated_run import Simulation, simulated_run
from tests.warm_python import warm_process


@pytest.mark.slow
def test_the_mean_deviation_is_that_of_the_log_and_every_token_is_counted(tmp_path: Path) -> None:
    written = rows()
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    pair = pair_of(run)
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(written), rel=1e-12)
    assert (pair.counts.num_sequences, pair.counts.num_tokens) == (len(written), 30 * len(written))
    assert pair.counts.num_prompts == len(written) // 2


@pytest.mark.slow
def test_the_page_says_that_a_log_was_compared_and_no_engine_of_ours(tmp_path: Path) -> None:
    run = imported(tmp_path, write(tmp_path / "log.jsonl", rows()))
    top = run_answer(run.read_summary(), run.read_manifest())
    assert {"engine (mu): the log's", "training path (pi): the log's"} <= set(top.facts)
    assert "vLLM" not in "".join(top.facts)
    assert "`" not in top.headline


@pytest.mark.slow
def test_a_log_of_several_files_says_which_is_read_and_how_long_the_others_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    log = tmp_path / "log"
    log.mkdir()
    for step in (1, 2, 3):
        write(log / f"step_{step}.jsonl", [row(number, step=step) for number in range(64)])
    answer = probe("import", log, "--out", tmp_path / "run", code=ExitCode.PASS)
    lines = [line for line in answer.stderr.splitlines() if line.startswith("reading the log, ")]
    assert lines == [
        "reading the log, file 1 of 3, 64 responses, 1,920 tokens",
        "reading the log, file 2 of 3, a few seconds left, 128 responses, 3,840 tokens",
        "reading the log, file 3 of 3, a few seconds left, 192 responses, 5,760 tokens",
    ]


@pytest.mark.slow
def test_tokens_that_the_policy_did_not_sample_are_in_no_number(tmp_path: Path) -> None:
    mask = [place % 3 != 0 for place in range(30)]
    written = rows(mask=mask)
    for one in written:
        one["logprobs"] = np.where(mask, one["logprobs"], 0.0).tolist()
    pair = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written)))
    assert pair.metrics["abs_logprob_diff"].value == pytest.approx(mean_abs(written), rel=1e-12)
    assert pair.counts.num_tokens == sum(mask) * len(written)


@pytest.mark.slow
def test_the_worst_token_is_named_by_its_place_in_the_response_and_not_among_the_sampled(tmp_path: Path) -> None:
    written = rows(mask=[place >= 10 for place in range(30)])
    written[3]["train_logprobs"][17] -= 9.0
    worst = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).worst_tokens[0]
    assert worst.position == 17
    assert worst.token == f"<id {written[3]['token_ids'][17]}>"


@pytest.mark.slow
def test_each_step_has_its_own_numbers(tmp_path: Path) -> None:
    written = [row(number, step=number // 8) for number in range(24)]
    for one in written[16:]:
        one["train_logprobs"] = [value - 0.5 for value in one["train_logprobs"]]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    steps = pair_of(run).steps
    assert [one.step for one in steps] == [0, 1, 2]
    for number, one in enumerate(steps):
        of_step = mean_abs(written[8 * number : 8 * number + 8])
        assert one.metrics["abs_logprob_diff"].value == pytest.approx(of_step, rel=1e-12)
    page = run.report_path.read_text()
    assert "Over the steps of training" in page
    assert ">weights</th>" not in page, "a column that has no value"
    assert "weight_bytes" not in page, "nothing is known of the checkpoint"
    assert ">Hardware<" not in page


@pytest.mark.slow
def test_weight_versions_of_one_step_are_kept_apart(tmp_path: Path) -> None:
    written = [row(number, step=7, weight_version=str(5 + number % 3)) for number in range(24)]
    steps = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).steps
    assert [(one.step, one.weight_version) for one in steps] == [(7, "5"), (7, "6"), (7, "7")]


@pytest.mark.slow
def test_versions_without_steps_have_a_table_and_no_empty_figure(tmp_path: Path) -> None:
    written = [row(number, weight_version=str(number % 2)) for number in range(24)]
    page = imported(tmp_path, write(tmp_path / "log.jsonl", written)).report_path.read_text()
    assert "log: each step" in page
    assert ">weights</th>" in page
    assert "figure-steps" not in page


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 12])
def test_a_level_that_changes_where_the_log_records_new_weights_is_in_the_answer(tmp_path: Path, times: int) -> None:
    written = rows(tokens=60, weight_versions=[["7", 0, 35], ["8", 35, 60]])
    for one in written:
        diff = np.subtract(one["train_logprobs"], one["logprobs"])
        one["train_logprobs"] = (one["logprobs"] + diff * np.repeat([times, 1], [35, 25])).tolist()
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    summary, pair = run.read_summary(), pair_of(run)
    words = ("before the last recorded change of the weights as after it", "--weights VERSION=FOLDER")
    shown = (summary.headline, "\n".join(pair.verdict.advice))
    assert [word in text for word, text in zip(words, shown, strict=True)] == [times > 1] * 2
    assert (pair.update_ratio or 1) == pytest.approx(times, rel=0.4)


def test_a_pair_whose_sides_were_computed_has_no_level_of_the_logs(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "run", Simulation())
    versions = VersionReading(num_responses=64, num_recorded=64, num_mixed=64, times_before=12.0, is_level_changed=True)
    counts = dict.fromkeys(("num_tokens", "num_sampled_tokens", "analysed_responses", "analysed_tokens"), 64)
    log = LogOrigin(format="plain", files=[], num_responses=64, **counts, versions=versions)
    pairs = summarise(run, run.read_manifest().model_copy(update={"log": log})).pairs
    assert {pair.update_ratio for pair in pairs} == {None}
    assert not any("recorded change" in line for pair in pairs for line in pair.verdict.evidence)


@pytest.mark.slow
def test_weight_versions_of_any_length_are_kept_apart(tmp_path: Path) -> None:
    """A number of thousands of digits is a text."""
    written = [row(number, weight_version="9" * 4000 + str(number % 2)) for number in range(24)]
    assert len(pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).steps) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logged", "words", "is_at", "sentence"),
    [
        ([0.7], (), 0.7, None),
        ([], (), 1.0, "1, because the log does not say; give --temperature"),
        ([0.7, 1.0], (), 1.0, "1, because the log says 0.7 and 1, and"),
        ([0.0], (), 1.0, "1, because the log says 0, and the report is of a single temperature above 0"),
        ([1e308], (), 1.0, "1, because the log says 1e+308, and"),
        ([0.7], ("--temperature", 0.8), 0.8, "0.8, as --temperature says; the log says 0.7"),
    ],
)
def test_the_temperature_is_the_one_that_the_log_says_or_it_is_said_why_not(
    tmp_path: Path, logged: list[float], words: tuple[object, ...], is_at: float, sentence: str | None
) -> None:
    written = rows()
    for number, one in enumerate(written):
        if logged:
            one["temperature"] = logged[number % len(logged)]
    manifest = imported(tmp_path, write(tmp_path / "log.jsonl", written), *words).read_manifest()
    assert manifest.settings.sampling.temperature == is_at
    assert manifest.log is not None
    assumed = manifest.log.assumed.get("temperature")
    assert (assumed or "").startswith(sentence or "")
    assert (assumed is None) == (sentence is None)


@pytest.mark.parametrize("temperature", [0, -1, "nan", "inf", 1e308])
def test_a_temperature_that_log_probs_cannot_have_is_refused(tmp_path: Path, temperature: object) -> None:
    log = write(tmp_path / "log.jsonl", rows())
    answer = probe("import", log, "--out", tmp_path / "run", "--temperature", temperature, code=ExitCode.USAGE)
    assert "give one above 0" in answer.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_was_made_inside_the_folder_of_its_log_is_no_second_copy_of_it(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", rows())
    imported(tmp_path, tmp_path)
    probe("import", tmp_path, "--out", tmp_path / "again", code=ExitCode.PASS)
    assert pair_of(RunDirectory(tmp_path / "again")).counts.num_sequences == 24


@pytest.mark.slow
def test_the_whole_log_lies_there_as_parquet_by_step_and_can_be_imported_again(tmp_path: Path) -> None:
    written = [row(number, step=number % 2) for number in range(24)]
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    table = dataset.dataset(run.path / "log", format="parquet").to_table()
    assert table.num_rows == len(written)
    again = RunDirectory(tmp_path / "again")
    probe("import", run.path / "log", "--out", again.path, code=ExitCode.PASS)
    assert pair_of(again).metrics == pair_of(run).metrics


@pytest.mark.slow
def test_of_a_large_log_whole_prompts_are_analysed_and_it_is_said_how_many(tmp_path: Path) -> None:
    written = rows(200)
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), "--max-tokens", 1000)
    origin, pair = run.read_manifest().log, pair_of(run)
    assert origin is not None
    assert (origin.num_responses, origin.num_sampled_tokens) == (200, 6000)
    assert 900 <= origin.analysed_tokens <= 1000
    assert pair.counts.num_tokens == origin.analysed_tokens
    assert pair.counts.num_sequences == 2 * (pair.counts.num_prompts or 0)
    assert dataset.dataset(run.path / "log", format="parquet").to_table().num_rows == 200


def test_a_log_without_the_trainers_side_is_inconclusive_and_says_what_computes_it(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", rows(with_pi=False))
    answer = probe("import", log, "--out", tmp_path / "run", code=ExitCode.INCONCLUSIVE)
    assert f"score {tmp_path / 'run'} --model CHECKPOINT" in answer.stdout
    answer = probe("report", tmp_path / "run", code=ExitCode.USAGE)
    assert "score" in answer.stderr
    assert "compare --resume" not in answer.stderr


@pytest.mark.slow
def test_a_reference_in_the_log_says_which_side_errs(tmp_path: Path) -> None:
    written = rows()
    for one in written:
        one["ref_logprobs"] = [value - 1e-6 for value in one["logprobs"]]
    log = write(tmp_path / "log.jsonl", written)
    words = ("--ref-is-fp32", "--train-dtype", "bf16", "--infer-dtype", "bf16")
    errors = pair_of(imported(tmp_path, log, *words)).blame
    assert errors is not None
    assert errors.rms_error_mu is not None
    assert errors.rms_error_mu.value == pytest.approx(1e-6, rel=1e-3)
    assert errors.rms_error_pi is not None
    assert errors.rms_error_pi.value == pytest.approx(NOISE, rel=0.2)


def test_a_side_is_not_held_against_a_dtype_that_was_only_assumed(tmp_path: Path) -> None:
    """A trainer in FP32 would be accused of computing in another format than the run says, which it never said."""
    written = [one | {"ref_logprobs": one["train_logprobs"]} for one in rows()]
    log = write(tmp_path / "log.jsonl", written)
    answer = probe("import", log, "--out", tmp_path / "run", "--ref-is-fp32", code=ExitCode.USAGE)
    assert "give --train-dtype and --infer-dtype" in answer.stderr


@pytest.mark.slow
def test_of_a_log_with_steps_left_out_the_others_are_analysed_to_the_limit(tmp_path: Path) -> None:
    written = [row(number, step=number // 2) for number in range(40)]
    for one in written[:-2]:
        one["train_logprobs"] = [0.0] * 30
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written), "--max-tokens", 60)
    assert pair_of(run).counts.num_tokens == 60


@pytest.mark.slow
def test_a_reference_policy_is_no_reference_of_errors(tmp_path: Path) -> None:
    """What most systems log under that name is the policy that training is kept near to."""
    written = rows()
    for one in written:
        one["ref_logprobs"] = [value - 0.3 for value in one["logprobs"]]
    errors = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).blame
    assert errors is None or errors.rms_error_mu is None


@pytest.mark.slow
def test_an_imported_run_cannot_be_continued_by_sampling(tmp_path: Path) -> None:
    run = imported(tmp_path, write(tmp_path / "log.jsonl", rows()))
    answer = probe("compare", "--resume", "--out", run.path, code=ExitCode.USAGE)
    assert "an imported log" in answer.stderr


def test_nothing_stays_of_a_log_that_cannot_be_used(tmp_path: Path) -> None:
    written = rows()
    written[20]["logprobs"] = [0.5]
    log = write(tmp_path / "log.jsonl", written)
    answer = probe("import", log, "--out", tmp_path / "run", code=ExitCode.USAGE)
    assert "line 21" in answer.stderr
    assert not (tmp_path / "run").exists()


def test_a_comparison_takes_no_logged_side(tmp_path: Path) -> None:
    config = tmp_path / "compare.toml"
    config.write_text(
        '[model]\npath = "demo"\n[[infer]]\nname = "x"\ndtype = "bf16"\nlogged = true\n[[train]]\nname = "y"\n'
        'dtype = "bf16"\n'
    )
    answer = probe("compare", "--config", config, "--out", tmp_path / "run", code=ExitCode.USAGE)
    assert "import" in answer.stderr


@pytest.mark.slow
def test_an_import_that_was_killed_is_begun_again_by_the_same_command(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", rows(2000))
    words = ("before-legs", "import", log, "--out", tmp_path / "run")
    with warm_process("tests.halts", *words, folder=tmp_path, errors=tmp_path / "stderr") as process:
        wait_until((tmp_path / "run" / ".writing-log").exists, "the log's copy", process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert pair_of(imported(tmp_path, log)).counts.num_sequences == 2000
    assert not list((tmp_path / "run").glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [("explain",), ("score", "--out", "SCORED")])
def test_what_goes_on_from_a_log_refuses_a_run_of_its_own_responses(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=2), with_summary=True)
    name, *others = (str(tmp_path / "scored") if word == "SCORED" else word for word in command)
    answer = probe(name, run.path, "--model", "demo", *others, code=ExitCode.USAGE)
    assert "was not imported from a log" in answer.stderr


@pytest.mark.slow
def test_an_import_that_is_interrupted_in_its_statistics_keeps_the_log_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    run, log = tmp_path / "run", write(tmp_path / "log.jsonl", rows())
    with monkeypatch.context() as patch:
        patch.setattr("mismatch_probe.importing.run.summarise", interrupted)
        answer = probe("import", log, "--out", run, code=ExitCode.INTERRUPTED)
    go_on = f"report {run} --recompute"
    assert go_on in answer.stderr
    assert go_on in probe("report", run, code=ExitCode.USAGE).stderr
    assert "an import begins anew" in probe("import", log, "--out", run, code=ExitCode.USAGE).stderr
    probe("report", run, "--recompute", code=ExitCode.PASS)
    assert pair_of(RunDirectory(run)).counts.num_sequences == len(rows())


@pytest.mark.slow
@pytest.mark.parametrize("nats", [0.0, 0.3, 1.0, 3.0])
def test_a_log_whose_sides_part_beyond_a_window_is_named_with_it(tmp_path: Path, nats: float) -> None:
    written = []
    for number in range(32):
        line = row(number, tokens=200) | {"prompt_token_ids": list(range(1, 20 + number))}
        places = 19 + number + np.arange(200)
        fall = nats * (places > 128) * np.random.default_rng(number).exponential(1.0, 200)
        written.append(line | {"logprobs": (np.asarray(line["logprobs"]) - fall).tolist()})
    verdict = pair_of(imported(tmp_path, write(tmp_path / "log.jsonl", written))).verdict
    assert (verdict.code == "onset") == bool(nats), verdict
    if nats > 1:
        assert verdict.sentence == (
            "The engine departs from place 129 of the context on, as where a sliding window or a sparse index of 128 "
            "tokens ends."
        )


@pytest.mark.slow
def test_a_log_whose_sides_part_once_in_each_chunk_is_named_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    for name, nats in (("chunked", 1.0), ("whole", 0.0)):
        written = []
        for number in range(32):
            line = row(number, tokens=200) | {"prompt_token_ids": list(range(1, 20 + number))}
            places = 19 + number + np.arange(200)
            log_pi = np.asarray(line["train_logprobs"]) - nats * (places % 64 == 63)
            written.append(line | {"train_logprobs": log_pi.clip(max=0).tolist()})
        (tmp_path / name).mkdir()
        verdict = pair_of(imported(tmp_path / name, write(tmp_path / name / "log.jsonl", written))).verdict
        assert (verdict.code == "period") == bool(nats), verdict
        if nats:
            assert verdict.sentence == (
                "One side errs once in every 64 places of the context, at 63 from the start of each block."
            )


def test_a_log_of_empty_responses_is_refused_as_such(tmp_path: Path) -> None:
    """And one whose mask is 0 throughout with its mask."""
    empty = {"prompt_token_ids": [1, 2], "token_ids": [], "logprobs": [], "train_logprobs": []}
    for lines, words in (([empty] * 3, "are all empty"), (rows(mask=[False] * 30), "fix its mask")):
        source = write(tmp_path / "log.jsonl", lines)
        ended = probe("import", source, "--out", tmp_path / "run", code=ExitCode.USAGE)
        assert words in ended.stderr
