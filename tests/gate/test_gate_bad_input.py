"""Whatever is wrong with a run or its baseline ends with a sentence, its exit code, and no file that says pass."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import ids_key, read_table, write_table
from mismatch_probe.stats.sequences import MISSING_LOG_PROB
from tests.gate.cli import GATE, GOOD, REGRESSION, CommandLine, check, gate_file
from tests.simulated_run import Simulation, edit_leg, edit_manifest, simulated_run

LEGS = ("train-bf16", "infer-bf16-decode", "ref-fp32")


def _first_row(change: Callable[[list[float]], None]) -> Callable[[RunDirectory], None]:
    return lambda run: edit_leg(run, "train-bf16", lambda columns: change(columns["logprobs"][0]))


def _nan(row: list[float]) -> None:
    row[1] = float("nan")


def _infinite(row: list[float]) -> None:
    row[1] = float("-inf")


def _positive(row: list[float]) -> None:
    row[1] = 3.0


def _floor(row: list[float]) -> None:
    row[1] = MISSING_LOG_PROB


def _engine_nan(run: RunDirectory) -> None:
    edit_leg(run, "infer-bf16-decode", lambda columns: _nan(columns["logprobs"][0]))


def _reference_nan(run: RunDirectory) -> None:
    edit_leg(run, "ref-fp32", lambda columns: _nan(columns["logprobs"][0]))


def _enormous(run: RunDirectory) -> None:
    def change(columns: dict[str, list[list[float]]]) -> None:
        columns["logprobs"][0][1] = -800.0

    edit_leg(run, "train-bf16", change)


def _other_ids(run: RunDirectory) -> None:
    def change(columns: dict[str, list[int]]) -> None:
        columns["ids_key"][0] += 1

    edit_leg(run, "train-bf16", change)


def _other_rows(run: RunDirectory) -> None:
    def change(columns: dict[str, list[str]]) -> None:
        columns["id"] = [f"another-{row_id}" for row_id in columns["id"]]

    edit_leg(run, "train-bf16", change)


def _empty(run: RunDirectory) -> None:
    for path in (run.rollouts_path, *map(run.leg_path, LEGS)):
        write_table(path, read_table(path).slice(0, 0))


def _no_tokens(run: RunDirectory) -> None:
    rollouts = read_table(run.rollouts_path)
    columns = rollouts.to_pydict()
    columns["token_ids"] = columns["token_texts"] = [[]] * len(columns["id"])
    write_table(run.rollouts_path, pa.table(columns, schema=rollouts.schema))
    for leg in LEGS:
        edit_leg(run, leg, lambda columns: columns.update(logprobs=[[]] * len(columns["id"])))
    _rekey(run)


def _rekey(run: RunDirectory) -> None:
    """Let every leg say that it was scored on the ids that the rollouts now hold."""
    rollouts = read_table(run.rollouts_path).to_pydict()
    keys = [ids_key(*ids) for ids in zip(rollouts["prompt_token_ids"], rollouts["token_ids"], strict=True)]
    for leg in LEGS:
        edit_leg(run, leg, lambda columns: columns.update(ids_key=keys))


def _truncated(run: RunDirectory) -> None:
    path = run.leg_path("train-bf16")
    path.write_bytes(path.read_bytes()[:-50])


def _missing_leg(run: RunDirectory) -> None:
    run.leg_path("train-bf16").unlink()


def _missing_rollouts(run: RunDirectory) -> None:
    run.rollouts_path.unlink()


def _fewer_rollouts(run: RunDirectory) -> None:
    write_table(run.rollouts_path, read_table(run.rollouts_path).slice(0, 20))


def _rewritten(path: Callable[[RunDirectory], Path], change: Callable[[pa.Table], pa.Table]) -> Callable[..., None]:
    def rewrite(run: RunDirectory) -> None:
        pq.write_table(change(read_table(path(run))), path(run))

    return rewrite


def _twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table])


def _as_text(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("logprobs")
    return table.set_column(place, "logprobs", pa.array([list(map(str, row)) for row in table["logprobs"].to_pylist()]))


def _rollouts(run: RunDirectory) -> Path:
    return run.rollouts_path


def _train(run: RunDirectory) -> Path:
    return run.leg_path("train-bf16")


def _broken_manifest(run: RunDirectory) -> None:
    run.manifest_path.write_text("{")


def _unfinished(manifest: Manifest) -> None:
    manifest.stages["score-train-bf16"].state = "running"


def _applied(stage: str, dtype: Dtype) -> Callable[[RunDirectory], None]:
    def change(manifest: Manifest) -> None:
        manifest.stages[stage].effective_settings["dtype"] = dtype

    return lambda run: edit_manifest(run, change)


def _no_stage(manifest: Manifest) -> None:
    manifest.stages.clear()


BROKEN_RUNS: dict[str, tuple[Callable[[RunDirectory], None], str]] = {
    "a missing log-prob of the training path": (_first_row(_nan), "lacks 1 log-prob of the training path"),
    "a log-prob at vLLM's floor": (_first_row(_floor), "lacks 1 log-prob of the training path"),
    "an infinite log-prob": (_first_row(_infinite), "1 infinite log-prob of the training path"),
    "a log-prob above 0": (_first_row(_positive), "1 log-prob of the training path above 0"),
    "a missing log-prob of the engine": (_engine_nan, "lacks 1 log-prob of the engine"),
    "a missing log-prob of the reference": (_reference_nan, "prefill or reference log-probs"),
    "other token ids": (_other_ids, "scored on other token ids"),
    "rows of another run": (_other_rows, "has no row for response"),
    "an empty run": (_empty, "holds no response at all"),
    "responses without a token": (_no_tokens, "has not one response token"),
    "a truncated parquet": (_truncated, "cannot be read"),
    "a leg without log-probs": (_rewritten(_train, lambda table: table.drop(["logprobs"])), "the columns id, ids_key"),
    "a leg without ids": (_rewritten(_train, lambda table: table.drop(["id"])), "the columns id, ids_key"),
    "log-probs as text": (_rewritten(_train, _as_text), "in their types"),
    "a leg with every row twice": (_rewritten(_train, _twice), "several rows of one response"),
    "responses without prompts": (_rewritten(_rollouts, lambda table: table.drop(["prompt_id"])), "the columns id"),
    "every response twice": (_rewritten(_rollouts, _twice), "several rows of one response"),
    "responses left out": (_fewer_rollouts, "has 20 responses, and 32 were asked for"),
    "a missing leg": (_missing_leg, "is missing"),
    "missing rollouts": (_missing_rollouts, "is missing"),
    "a damaged manifest": (_broken_manifest, "manifest.json cannot be read"),
    "an unfinished run": (
        lambda run: edit_manifest(run, _unfinished),
        "stages are not done, score-train-bf16 the first of them",
    ),
    "a run without stages": (lambda run: edit_manifest(run, _no_stage), "is unfinished"),
    "training in another dtype": (_applied("score-train-bf16", Dtype.FP32), "the training path for bf16/bf16"),
    "an engine in another dtype": (_applied("sample-bf16", Dtype.FP16), "ran in fp16, not in bf16"),
}


@pytest.mark.parametrize(("breaks", "words"), BROKEN_RUNS.values(), ids=BROKEN_RUNS)
def test_data_that_must_not_be_judged(
    command_line: CommandLine,
    small: RunDirectory,
    tmp_path: Path,
    breaks: Callable[[RunDirectory], None],
    words: str,
) -> None:
    config = gate_file(tmp_path, GATE + GOOD)
    assert command_line("gate", small.path, "--config", config).code == ExitCode.PASS
    breaks(small)
    ended = command_line("gate", small.path, "--config", config)
    assert ended.code == ExitCode.ENVIRONMENT
    assert words in ended.stderr
    assert json.loads((small.path / "gate.json").read_text())["answer"] == "error"
    assert "<error" in (small.path / "junit.xml").read_text()


def test_a_metric_beyond_a_float_is_never_a_pass(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    _enormous(small)
    config = gate_file(tmp_path, GATE + check(metric="token_mult_prob_error", max=1.05, level="warn"))
    ended = command_line("gate", small.path, "--config", config)
    assert (ended.code, "largest float64" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


def test_a_run_that_does_not_exist(command_line: CommandLine, tmp_path: Path) -> None:
    ended = command_line("gate", tmp_path / "none", "--config", gate_file(tmp_path, GATE + GOOD))
    assert (ended.code, "does not exist" in ended.stderr) == (ExitCode.USAGE, True)


def test_a_folder_that_is_no_run(command_line: CommandLine, tmp_path: Path) -> None:
    ended = command_line("gate", tmp_path, "--config", gate_file(tmp_path, GATE + GOOD))
    assert (ended.code, "is not a run directory" in ended.stderr) == (ExitCode.USAGE, True)
    assert not (tmp_path / "gate.json").exists()


SMALL = Simulation(num_prompts=32, mean_length=20)


def _with_other_prompts(run: RunDirectory) -> None:
    rollouts = read_table(run.rollouts_path)
    columns = rollouts.to_pydict()
    columns["prompt_id"] = [f"other-{prompt}" for prompt in columns["prompt_id"]]
    write_table(run.rollouts_path, pa.table(columns, schema=rollouts.schema))


def _equal_policies(run: RunDirectory) -> None:
    mu = read_table(run.leg_path("infer-bf16-decode"))["logprobs"].to_pylist()
    edit_leg(run, "train-bf16", lambda columns: columns.update(logprobs=mu))


BAD_BASELINES: dict[str, tuple[Simulation, Callable[[RunDirectory], None], str, ExitCode]] = {
    "another model": (
        Simulation(num_prompts=32, fingerprint="checkpoint-b"),
        lambda run: None,
        "is of another model",
        ExitCode.USAGE,
    ),
    "another temperature": (
        Simulation(num_prompts=32, sampling={"temperature": 0.7}),
        lambda run: None,
        "was sampled with temperature = 0.7",
        ExitCode.USAGE,
    ),
    "another pair": (
        Simulation(num_prompts=32, pairs=((Dtype.FP16, Dtype.FP16),)),
        lambda run: None,
        "has no pair bf16/bf16",
        ExitCode.USAGE,
    ),
    "no prompt in common": (SMALL, _with_other_prompts, "shares no prompt", ExitCode.USAGE),
    "nothing to be worse than": (
        replace(SMALL, run_key="a"),
        _equal_policies,
        "a share of 0 says nothing",
        ExitCode.USAGE,
    ),
    "missing log-probs": (SMALL, _first_row(_nan), "lacks 1 log-prob", ExitCode.ENVIRONMENT),
}


@pytest.mark.parametrize(("simulation", "breaks", "words", "code"), BAD_BASELINES.values(), ids=BAD_BASELINES)
def test_a_baseline_that_says_nothing(
    command_line: CommandLine,
    small: RunDirectory,
    tmp_path: Path,
    simulation: Simulation,
    breaks: Callable[[RunDirectory], None],
    words: str,
    code: ExitCode,
) -> None:
    other = simulated_run(tmp_path / "baseline", simulation)
    breaks(other)
    config = gate_file(tmp_path, GATE + REGRESSION)
    ended = command_line("gate", small.path, "--config", config, "--baseline", other.path)
    assert (ended.code, words in ended.stderr) == (code, True), ended


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_is_not_its_own_baseline(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path, is_copied: bool
) -> None:
    other = Path(shutil.copytree(small.path, tmp_path / "copy")) if is_copied else small.path
    config = gate_file(tmp_path, GATE + REGRESSION)
    ended = command_line("gate", small.path, "--config", config, "--baseline", other)
    assert (ended.code, "the run itself" in ended.stderr) == (ExitCode.USAGE, True), ended


def test_prompts_with_other_token_ids_are_not_the_baselines(
    command_line: CommandLine, small: RunDirectory, tmp_path: Path
) -> None:
    other = simulated_run(tmp_path / "baseline", SMALL)
    rollouts = read_table(other.rollouts_path)
    columns = rollouts.to_pydict()
    columns["prompt_token_ids"] = [[9, *ids] for ids in columns["prompt_token_ids"]]
    write_table(other.rollouts_path, pa.table(columns, schema=rollouts.schema))
    _rekey(other)
    config = gate_file(tmp_path, GATE + REGRESSION)
    ended = command_line("gate", small.path, "--config", config, "--baseline", other.path)
    assert (ended.code, "32 of 32 prompts have other token ids" in ended.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--junit", "{gate}"], "is the file that --config names"),
        (["--junit", "{folder}/out", "--markdown", "{folder}/sub/../out"], "is the file that --junit names"),
        (["--junit", "/dev/null"], "--junit /dev/null is no file that could be replaced"),
        (["--markdown", "{folder}"], "is no file that could be replaced"),
    ],
)
def test_an_output_never_takes_the_place_of_another_file(
    words: list[str], sentence: str, command_line: CommandLine, tmp_path: Path
) -> None:
    run, config = simulated_run(tmp_path / "run", Simulation(num_prompts=32)), gate_file(tmp_path, GATE + GOOD)
    before = config.read_text()
    given = [word.format(gate=config, folder=tmp_path) for word in words]
    ended = command_line("gate", run.path, "--config", config, *given)
    assert (ended.code, sentence in ended.stderr) == (ExitCode.USAGE, True), ended
    assert config.read_text() == before
