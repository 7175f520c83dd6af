"""A log of a real engine's responses, scored and explained with its checkpoint: real vLLM, a tiny model."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from benchmarks.fault_lab.in_training import other_weights
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.findings import Explanation
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.tables import read_table
from tests.command_line import FEW, probe
from tests.explain.logs import scored
from tests.importing.from_run import log_of_run
from tests.importing.logs import write
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def compared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A comparison in BF16, whose records the logs are made of."""
    folder = tmp_path_factory.mktemp("compared")
    prompts = write(folder / "prompts.jsonl", [{"prompt_token_ids": [257, 40, 50 + one]} for one in range(24)])
    words = ["--prompts", prompts, "--dtype", "bf16", "--max-new-tokens", 24, "--out", folder / "run", "--config", FEW]
    probe("compare", "--model", model, *words, code=ExitCode.PASS)
    return RunDirectory(folder / "run")


@pytest.fixture(scope="module")
def imported(compared: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    log = write(folder / "log.jsonl", log_of_run(compared, "bf16"))
    probe("import", log, "--out", folder / "run", code=ExitCode.PASS)
    return folder / "run"


@pytest.fixture(scope="module")
def explained(imported: Path, model: Path) -> Explanation:
    """What `explain` made of it, which it files there."""
    return _explained(imported, model)


def test_zeros_for_missing_numbers_are_told_by_the_side_that_is_computed(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    """The log has the engine's side alone, and of two of its responses zeros."""
    alone = [{name: one[name] for name in one if name != "train_logprobs"} for one in log_of_run(compared, "bf16")]
    for one in alone[:2]:
        one["logprobs"] = [0.0] * len(one["logprobs"])
    log = write(tmp_path / "log.jsonl", alone)
    probe("import", log, "--out", tmp_path / "run", code=ExitCode.INCONCLUSIVE)
    words = ["--model", model, "--no-engine", "--out", tmp_path / "scored"]
    probe("score", tmp_path / "run", *words, code=ExitCode.PASS)
    (pair,) = RunDirectory(tmp_path / "scored").read_summary().pairs
    lost = sum(len(one["logprobs"]) for one in alone[:2])
    assert (pair.counts.missing_mu, pair.counts.left_out_tokens) == (lost, lost)
    assert pair.metrics["abs_logprob_diff"].value < 0.05


def test_scoring_a_log_gives_the_numbers_of_the_run_that_it_was_written_by(
    compared: RunDirectory, imported: Path, model: Path, tmp_path: Path
) -> None:
    probe("score", imported, "--model", model, "--out", tmp_path / "scored", code=ExitCode.PASS)
    pairs = {(pair.train, pair.infer): pair for pair in RunDirectory(tmp_path / "scored").read_summary().pairs}
    assert list(pairs) == [("log", "log"), ("bf16", "log"), ("bf16", "bf16"), ("fp32", "fp32")]
    (original,) = compared.read_summary().pairs
    logged, recomputed = pairs["log", "log"], pairs["bf16", "log"]
    for name in ("abs_logprob_diff", "kl_k3"):
        assert logged.metrics[name].value == pytest.approx(original.metrics[name].value, rel=1e-6)
        assert recomputed.metrics[name].value == pytest.approx(original.metrics[name].value, rel=1e-3)
    assert logged.blame is not None
    assert original.blame is not None
    assert logged.blame.rms_error_mu is not None
    assert original.blame.rms_error_mu is not None
    assert logged.blame.rms_error_mu.value == pytest.approx(original.blame.rms_error_mu.value, rel=1e-3)
    assert pairs["fp32", "fp32"].verdict.kind == "clean"
    assert pairs["bf16", "bf16"].verdict.kind == "precision"


IMAGE = 300


@pytest.fixture(scope="module")
def seeing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint, whose config names a token for the patches of images."""
    folder = copytree(model, tmp_path_factory.mktemp("seeing") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": IMAGE}))
    return folder


def with_pictures(compared: RunDirectory, num_rows: int) -> list[dict[str, Any]]:
    """The log of the run, whose first rows had a picture before the prompt: what follows fits no text alone."""
    rows = log_of_run(compared, "bf16")
    for row in rows[:num_rows]:
        row["prompt_token_ids"] = [257, *[IMAGE] * 40, *row["prompt_token_ids"][1:]]
    return rows


@pytest.mark.parametrize("num_rows", [1, 20])
def test_responses_behind_a_picture_are_left_out_and_accused_of_nothing(
    compared: RunDirectory, seeing: Path, tmp_path: Path, num_rows: int
) -> None:
    rows = with_pictures(compared, num_rows)
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "run", code=ExitCode.PASS)
    words = ["--model", seeing, "--no-engine", "--out", tmp_path / "scored"]
    probe("score", tmp_path / "run", *words, code=ExitCode.PASS)
    scored_run = RunDirectory(tmp_path / "scored")
    log = scored_run.read_manifest().log
    assert log is not None
    [note] = [note for note in log.notes if note.code == "images"]
    assert note.sentence.startswith(f"{num_rows} of {len(rows)} responses hold placeholders of images")
    assert note.evidence == {"responses": num_rows, "tokens": 40 * num_rows, "ids": [IMAGE]}
    for pair in scored_run.read_summary().pairs:
        assert pair.counts.num_sequences == len(rows) - num_rows
        assert pair.verdict.kind not in ("bug", "broken")
        assert pair.metrics["abs_logprob_diff"].value < 0.05
    assert [side.verdict.kind for side in _explained(tmp_path / "run", seeing).sides] == ["clean", "clean"]


def test_a_log_of_pictures_alone_is_refused_and_one_without_is_scored_whole(
    compared: RunDirectory, imported: Path, seeing: Path, tmp_path: Path
) -> None:
    rows = with_pictures(compared, 24)
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "run", code=ExitCode.PASS)
    words = ["--model", seeing, "--no-engine", "--out", tmp_path / "scored"]
    refused = probe("score", tmp_path / "run", *words, code=ExitCode.USAGE)
    assert "the log has no pixels" in refused.stderr
    probe("score", imported, *words, code=ExitCode.PASS)
    log = RunDirectory(tmp_path / "scored").read_manifest().log
    assert log is not None
    assert [note for note in log.notes if note.code == "images"] == []


def test_every_response_to_a_prompt_is_scored_by_the_engine_too(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    """Three to each of four prompts, though they were sampled to other ones."""
    rows = log_of_run(compared, "bf16")[:12]
    for number, one in enumerate(rows):
        one["prompt_token_ids"] = rows[number % 4]["prompt_token_ids"]
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "run", code=ExitCode.PASS)
    probe("score", tmp_path / "run", "--model", model, "--out", tmp_path / "scored", code=ExitCode.PASS)
    pairs = {(pair.train, pair.infer): pair for pair in RunDirectory(tmp_path / "scored").read_summary().pairs}
    assert {pair.counts.num_sequences for pair in pairs.values()} == {12}
    assert pairs["fp32", "fp32"].verdict.kind == "clean"


def test_a_log_as_declared_is_explained_by_rounding_alone(imported: Path, explained: Explanation) -> None:
    assert explained.verdict.kind == "clean"
    assert [side.side for side in explained.sides] == ["mu", "pi"]
    assert "What explains the log" in (imported / "report.html").read_text()


def test_a_temperature_that_is_declared_and_was_not_applied_is_named_on_both_sides(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    """Both columns were computed at 1, and the import says 0.7."""
    tempered = tmp_path / "tempered"
    log = write(tmp_path / "log.jsonl", log_of_run(compared, "bf16"))
    probe("import", log, "--out", tempered, "--temperature", 0.7)
    for side in _explained(tempered, model).sides:
        assert side.verdict.kind == "bug", side.verdict
        assert side.explained_by is not None
        assert [departure.code for departure in side.explained_by.departures] == ["raw_logprobs"]


def test_a_header_and_a_cut_that_are_given_by_flags_are_tried(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    rows, header = log_of_run(compared, "bf16"), [40, 41, 42, 43]
    with_header = [
        TokenSequence(str(at), [*row["prompt_token_ids"][:1], *header, *row["prompt_token_ids"][1:]], row["token_ids"])
        for at, row in enumerate(rows)
    ]
    for row, column in zip(rows, scored(model, with_header), strict=True):
        row["logprobs"] = column.tolist()
    run = tmp_path / "imported"
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", run)
    flags = ["--header", "40,41,42,43", "--header", "You are terse.", "--min-p", 0.05]
    answer = probe("explain", run, "--model", model, "--json", *flags, code=ExitCode.PASS)
    mu = next(side for side in Explanation.model_validate_json(answer.stdout).sides if side.side == "mu")
    assert mu.explained_by is not None
    departures = {departure.code: departure.what for departure in mu.explained_by.departures}
    assert departures["prompt_prefix"] == "a prompt with an extra header of 4 tokens behind its BOS"
    assert departures.keys() - {"prompt_prefix"} <= {"raw_logprobs", "truncated_support"}
    assert len(departures) == 2


@pytest.mark.usefixtures("explained")
def test_a_log_that_was_explained_once_is_not_silently_explained_again(imported: Path, model: Path) -> None:
    answer = probe("explain", imported, "--model", model, code=ExitCode.USAGE)
    assert "explain.json is there already: remove it to look again" in answer.stderr
    assert "--out" not in answer.stderr


@pytest.mark.parametrize("with_pi", [True, False])
def test_another_checkpoint_than_the_logs_is_told(
    compared: RunDirectory, model: Path, tmp_path: Path, with_pi: bool
) -> None:
    rows = log_of_run(compared, "bf16")
    if not with_pi:
        rows = [{name: row[name] for name in row if name != "train_logprobs"} for row in rows]
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "imported")
    other = other_weights(model, tmp_path / "weights", 0.05)
    verdicts = {}
    for name, checkpoint in (("right", model), ("other", other)):
        words = ["--model", checkpoint, "--out", tmp_path / name, "--no-engine"]
        probe("score", tmp_path / "imported", *words, code=ExitCode.PASS)
        verdicts[name] = RunDirectory(tmp_path / name).read_summary().verdict
    assert verdicts["right"].code != "other_checkpoint"
    assert (verdicts["other"].kind, verdicts["other"].code) == ("undecided", "other_checkpoint")
    assert verdicts["other"].sentence.startswith("The checkpoint is not the one that made this log")


def test_a_sampler_of_older_weights_beside_a_trainer_of_the_checkpoint_is_a_bug(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    rows = log_of_run(compared, "bf16")
    stale = other_weights(model, tmp_path / "stale", 0.05)
    sequences = [TokenSequence(str(at), row["prompt_token_ids"], row["token_ids"]) for at, row in enumerate(rows)]
    for row, column in zip(rows, scored(stale, sequences), strict=True):
        row["logprobs"] = column.tolist()
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "imported")
    words = ["--model", model, "--out", tmp_path / "scored", "--no-engine"]
    probe("score", tmp_path / "imported", *words, code=ExitCode.PASS)
    verdict = RunDirectory(tmp_path / "scored").read_summary().verdict
    assert (verdict.kind, verdict.code) == ("bug", "beyond_format")
    assert "the engine's side errs" in verdict.sentence


def test_a_step_of_its_own_weights_is_scored_alone(compared: RunDirectory, model: Path, tmp_path: Path) -> None:
    rows = log_of_run(compared, "bf16")
    for number, one in enumerate(rows):
        one["step"] = number % 2
    probe("import", write(tmp_path / "log.jsonl", rows), "--out", tmp_path / "imported", code=ExitCode.PASS)
    words = ["score", tmp_path / "imported", "--model", model, "--out", tmp_path / "scored", "--no-engine"]
    answer = probe(*words, code=ExitCode.USAGE)
    assert "give --step" in answer.stderr
    answer = probe(*words, "--step", 1, code=ExitCode.PASS)
    assert "compare --resume" not in answer.stderr
    pairs = RunDirectory(tmp_path / "scored").read_summary().pairs
    assert [(pair.train, pair.infer, pair.counts.num_sequences) for pair in pairs] == [
        ("log", "log", 12),
        ("bf16", "log", 12),
    ]


def _explained(run: Path, model: Path) -> Explanation:
    answer = probe("explain", run, "--model", model, "--json", code=ExitCode.PASS)
    assert np.isfinite(json.loads(answer.stdout)["seconds"])
    return Explanation.model_validate_json(answer.stdout)


def test_one_call_imports_explains_and_scores_and_shows_text(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", log_of_run(compared, "bf16"))
    words = ["--out", tmp_path / "run", "--model", model, "--scored", tmp_path / "scored", "--json"]
    answer = probe("import", log, *words, code=ExitCode.PASS)
    run, scored_run = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "scored")
    assert run.read_manifest().model.has_tokenizer
    texts = read_table(run.rollouts_path)["token_texts"].to_pylist()
    assert texts == read_table(compared.rollouts_path)["token_texts"].to_pylist()
    assert (run.path / "explain.json").exists()
    assert (scored_run.path / "explain.json").exists(), "what was found of the log is known of its scored run"
    summary = scored_run.read_summary()
    assert {"log", "bf16", "fp32"} <= {pair.train for pair in summary.pairs}
    assert json.loads(answer.stdout)["pairs"][0]["train"] == summary.pairs[0].train


def test_a_log_without_the_trainers_side_is_explained_in_the_same_call(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    alone = [{name: one[name] for name in one if name != "train_logprobs"} for one in log_of_run(compared, "bf16")]
    log = write(tmp_path / "log.jsonl", alone)
    answer = probe("import", log, "--out", tmp_path / "run", "--model", model)
    assert answer.returncode in (ExitCode.PASS, ExitCode.INCONCLUSIVE), answer
    assert "Tried on the engine's side" in answer.stdout


def test_an_engine_that_departs_from_a_place_on_is_named_in_a_log_of_it_alone(
    compared: RunDirectory, model: Path, tmp_path: Path
) -> None:
    """Without the departure the same log is as declared."""
    random = np.random.default_rng(0)
    verdicts = []
    for name, nats in (("sound", 0.0), ("departs", 2.0)):
        rows = [{key: one[key] for key in one if key != "train_logprobs"} for one in log_of_run(compared, "bf16")]
        for one in rows:
            mu = np.array(one["logprobs"])
            is_behind = len(one["prompt_token_ids"]) + np.arange(mu.size) >= 15
            one["logprobs"] = np.minimum(mu + nats * is_behind * random.normal(size=mu.size), -1e-4).tolist()
        probe("import", write(tmp_path / f"{name}.jsonl", rows), "--out", tmp_path / name, "--model", model)
        explanation = Explanation.model_validate_json((tmp_path / name / "explain.json").read_text(encoding="utf-8"))
        verdicts.append(explanation.sides[0].verdict)
    assert [verdict.code for verdict in verdicts] == ["as_declared", "onset"]
    assert verdicts[1].sentence.startswith("The engine's side (mu) departs from place 15 of the context on")
    assert "every prompt has 3 tokens: it may be a place of the response" in verdicts[1].evidence


@pytest.mark.parametrize("words", [("--step", 3), ("--scored", "there")])
def test_what_is_computed_with_a_checkpoint_needs_one(tmp_path: Path, words: tuple[object, ...]) -> None:
    log = write(tmp_path / "log.jsonl", [])
    refused = probe("import", log, "--out", tmp_path / "run", *words, code=ExitCode.USAGE)
    assert "give --model" in refused.stderr


def test_a_checkpoint_that_is_not_there_is_found_out_before_the_log_is_read(tmp_path: Path) -> None:
    refused = probe(
        "import", tmp_path / "no.jsonl", "--out", tmp_path / "run", "--model", "./none", code=ExitCode.USAGE
    )
    assert "./none does not exist" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("step", "word"), [(None, "CHECKPOINT"), (99, "MODEL")])
def test_the_command_that_goes_on_does_not_repeat_a_checkpoint_that_cannot_be_used(
    model: Path, tmp_path: Path, step: int | None, word: str
) -> None:
    """Without weights the checkpoint is the fault, and with a step that the log lacks it is not."""
    log = write(tmp_path / "log.jsonl", [{"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-1.0], "step": 1}])
    given_model = model if step is not None else tmp_path / "bare"
    if step is None:
        given_model.mkdir()
        (given_model / "config.json").write_bytes((model / "config.json").read_bytes())
    words = [] if step is None else ["--step", step]
    ended = probe("import", log, "--model", given_model, *words, "--out", tmp_path / "run", code=ExitCode.USAGE)
    expected = given_model if word == "MODEL" else word
    assert f"    mismatch-probe explain {tmp_path / 'run'} --model {expected}\n" in ended.stderr


def test_the_command_that_goes_on_keeps_the_step_and_names_no_checkpoint_that_does_not_fit_the_log(
    model: Path, tmp_path: Path
) -> None:
    lines = [{"prompt_token_ids": [1, 2], "token_ids": [10**6], "logprobs": [-1.0], "step": step} for step in (1, 2)]
    log, run = write(tmp_path / "log.jsonl", lines), tmp_path / "run"
    ended = probe("import", log, "--model", model, "--step", 2, "--out", run, code=ExitCode.USAGE)
    assert f"    mismatch-probe explain {run} --model CHECKPOINT --step 2\n" in ended.stderr
    assert "give --model the checkpoint whose tokenizer made it" in ended.stderr
