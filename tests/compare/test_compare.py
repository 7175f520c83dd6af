"""`compare` with real vLLM, real transformers and tiny checkpoints; what is killed or interrupted is a process."""

import json
import os
import shutil
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.manifest import StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table, write_table
from tests.command_line import FEW, Answer, probe
from tests.halts import is_begun, wait_until
from tests.processes import processes_of, wait_until_gone
from tests.simulated_run import edit_manifest
from tests.tiny_models import make_checkpoint
from tests.warm_python import WarmProcess, warm_process

pytestmark = pytest.mark.slow

SMALL = ("--prompts", "sums:easy", "--num-prompts", "8", "--max-new-tokens", "24", "--vllm.enforce_eager", "true")


def compare(*words: object, code: ExitCode = ExitCode.PASS) -> Answer:
    return probe("compare", *words, code=code)


def halting(point: str, folder: Path, *words: object) -> AbstractContextManager[WarmProcess]:
    """The command beside the body, which halts at the point; what it says is in the folder's `stderr`."""
    return warm_process("tests.halts", point, "compare", *words, folder=folder, errors=folder / "stderr")


def kill(process: WarmProcess, folder: Path) -> None:
    """And wait until nothing of it works in the folder."""
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until_gone(folder)


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def recorded(run: Path) -> dict[str, Any]:
    """The summary and every table, but for the key of the run that its legs hold; as text, where one NaN is another."""
    tables = [run / "prompts.parquet", run / "rollouts.parquet", *sorted((run / "legs").iterdir())]
    contents = {str(path.relative_to(run)): str(read_table(path).to_pydict()) for path in tables}
    return {"summary.json": (run / "summary.json").read_bytes(), **contents}


@pytest.fixture(scope="module")
def four_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "four.toml"
    path.write_text("[engine]\nbatch_sequences = 2\n[training]\nbatch_tokens = 256\n" + FEW.read_text())
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, llama: Path, four_batches: Path) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    answer = compare("--model", llama, "--dtype", "bf16", "--out", run, "--config", four_batches, "--json", *SMALL)
    assert json.loads(answer.stdout) == summary_of(run)
    return run


def test_sliding_windows_agree_in_fp32_and_differ_in_bf16_by_precision(tmp_path: Path) -> None:
    """`test_experts_end_to_end` has the same of a mixture of experts."""
    model = make_checkpoint(tmp_path / "model", "mistral-sliding")
    compare("--model", model, "--dtype", "bf16", "--dtype", "fp32", "--config", FEW, "--out", tmp_path / "run", *SMALL)
    summary = summary_of(tmp_path / "run")
    bf16, fp32 = summary["pairs"]
    assert fp32["verdict"]["code"] == "clean"
    assert fp32["metrics"]["abs_logprob_diff"]["value"] < 1e-5
    assert bf16["verdict"]["kind"] == "precision"
    assert bf16["metrics"]["kl_k3"]["low"] > 100 * fp32["metrics"]["kl_k3"]["high"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_an_engine_with_another_rope_base_is_a_bug_and_not_precision(tmp_path: Path, llama: Path) -> None:
    overrides = '{"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}'
    compare(
        "--model", llama, "--dtype", "bf16", "--dtype", "fp32", "--out", tmp_path / "run", *SMALL,
        "--config", FEW, "--vllm.hf_overrides", overrides,
    )  # fmt: skip
    summary = summary_of(tmp_path / "run")
    assert {pair["verdict"]["kind"] for pair in summary["pairs"]} == {"bug"}
    assert summary["headline"] == "Bug: rope_theta is 10,000 on the training path and 500 in the engine."


def test_a_killed_run_resumes_from_its_batches_to_the_same_bytes(
    tmp_path: Path, llama: Path, four_batches: Path, whole_run: Path
) -> None:
    """So two runs of the same settings give the same bytes."""
    run = tmp_path / "killed"
    flags = ("--model", llama, "--dtype", "bf16", "--out", run, "--config", four_batches, *SMALL)
    with halting("after-part:sample-bf16", tmp_path, *flags) as process:
        wait_until(lambda: is_begun(run, "sample-bf16"), "the first batch", process)
        kill(process, tmp_path)
    assert not (run / "summary.json").exists()
    answer = compare("--out", run, "--resume")
    assert ": the engine samples in BF16, 1 of 4 batches recorded" in answer.stderr
    assert recorded(run) == recorded(whole_run)


def test_parts_of_a_job_that_was_ahead_of_its_killed_command_are_computed_again(
    tmp_path: Path, llama: Path, whole_run: Path
) -> None:
    """Their settings are unknown: the command was killed before it recorded that the stage began."""
    run = shutil.copytree(whole_run, tmp_path / "ahead")
    (run / "summary.json").unlink()
    (run / "legs" / "train-bf16.parquet").unlink()
    directory = RunDirectory(run)
    edit_manifest(directory, lambda manifest: manifest.stages.update({"score-train-bf16": StageRecord()}))
    with halting("before-beginning:score-train-bf16", tmp_path, "--out", run, "--resume") as process:
        wait_until(lambda: list((run / "parts" / "score-train-bf16").glob("*-train-bf16.parquet")), "a part", process)
        kill(process, tmp_path)
    compare("--out", run, "--resume")
    applied = [RunDirectory(path).read_manifest().stages["score-train-bf16"] for path in (run, whole_run)]
    assert applied[0].effective_settings == applied[1].effective_settings
    assert recorded(run) == recorded(whole_run)


def test_a_lost_leg_is_computed_again_without_sampling_again(tmp_path: Path, whole_run: Path) -> None:
    run = tmp_path / "lost"
    shutil.copytree(whole_run, run)
    (run / "legs" / "infer-bf16-prefill.parquet").unlink()
    (run / "summary.json").unlink()
    answer = compare("--out", run, "--resume")
    assert ": the engine scores its own responses in BF16" in answer.stderr
    assert "the engine samples in" not in answer.stderr
    assert recorded(run) == recorded(whole_run)


def test_lost_responses_are_sampled_again_and_no_leg_is_scored_again(tmp_path: Path, whole_run: Path) -> None:
    run = tmp_path / "lost"
    shutil.copytree(whole_run, run)
    (run / "rollouts.parquet").unlink()
    answer = compare("--out", run, "--resume")
    assert ": the engine samples in BF16" in answer.stderr
    assert "scores the responses" not in answer.stderr
    assert recorded(run) == recorded(whole_run)


def test_what_only_the_engine_can_refuse_leaves_nothing_behind(tmp_path: Path, llama: Path) -> None:
    run = tmp_path / "refused"
    flags = ("--model", llama, "--dtype", "bf16", "--out", run, *SMALL, "--vllm.kv_cache_dtype", "nonsense")
    output = compare(*flags, code=ExitCode.USAGE).stderr
    assert "--vllm.kv_cache_dtype nonsense" in output
    assert not run.exists()


def test_an_interrupt_ends_with_130_says_how_to_continue_and_leaves_no_child(
    tmp_path: Path, llama: Path, four_batches: Path
) -> None:
    run = tmp_path / "interrupted"
    flags = ("--model", llama, "--dtype", "bf16", "--out", run, "--config", four_batches, *SMALL)
    with halting("after-part:sample-bf16", tmp_path, *flags) as process:
        wait_until(lambda: is_begun(run, "sample-bf16"), "the first batch", process)
        assert len(processes_of(tmp_path)) > 1
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == ExitCode.INTERRUPTED
        wait_until_gone(tmp_path)
    errors = (tmp_path / "stderr").read_text()
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_other_settings_cannot_resume_a_run(llama: Path, whole_run: Path) -> None:
    before = recorded(whole_run)
    answer = compare("--out", whole_run, "--resume", "--temperature", "0.7", code=ExitCode.USAGE)
    assert "sampling.temperature = 1.0 (now 0.7)" in " ".join(answer.stderr.split())
    assert recorded(whole_run) == before


def test_a_finished_run_is_not_overwritten(llama: Path, whole_run: Path) -> None:
    answer = compare("--model", llama, "--out", whole_run, code=ExitCode.USAGE)
    assert "--resume" in answer.stderr


def test_report_renders_from_files_alone_and_recomputes_the_same_summary(whole_run: Path) -> None:
    before = recorded(whole_run)
    (whole_run / "report.html").unlink()
    probe("report", whole_run, "--recompute", code=ExitCode.PASS)
    assert (whole_run / "report.html").exists()
    assert recorded(whole_run) == before


def test_a_missing_log_prob_breaks_the_verdict(tmp_path: Path, whole_run: Path) -> None:
    run = tmp_path / "broken"
    shutil.copytree(whole_run, run)
    leg = run / "legs" / "train-bf16.parquet"
    table = pq.read_table(leg)
    logprobs = table["logprobs"].to_pylist()
    logprobs[0][0] = float("nan")
    position = table.schema.get_field_index("logprobs")
    changed = table.set_column(
        position, table.schema.field(position), pa.array(logprobs, type=table.schema.field(position).type)
    )
    write_table(leg, changed)
    probe("report", run, "--recompute", code=ExitCode.ENVIRONMENT)
    verdict = summary_of(run)["verdict"]
    assert (verdict["kind"], verdict["code"]) == ("broken", "missing_logprobs")


def test_a_model_that_vllm_does_not_support_is_one_sentence(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    answer = compare("--model", model, "--dtype", "bf16", "--out", tmp_path / "run", *SMALL, code=ExitCode.ENVIRONMENT)
    assert "NoSuchForCausalLM" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_model_with_recurrent_layers_is_compared_like_any_other(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "falcon-h1")
    words = (*SMALL, "--config", FEW, "--dtype", "bf16", "--dtype", "fp32", "--out", tmp_path / "run")
    compare("--model", model, *words)
    run = RunDirectory(tmp_path / "run")
    summary = run.read_summary()
    assert [pair.verdict.kind for pair in summary.pairs] == ["precision", "clean"]
    assert {finding.setting for finding in summary.preflight if finding.level != "note"} <= {"state_dtypes"}
    assert all(pair.blame is not None and "ref" in pair.legs for pair in summary.pairs)
    agreement = run.read_manifest().stages["score-ref-fp32"].effective_settings["agreement_with_itself"]
    assert agreement["num_tokens"] > 0
    assert 0 <= agreement["cached_nats"] < 1e-4
    compare("--resume", "--out", tmp_path / "run")
    assert run.read_manifest().stages["score-ref-fp32"].effective_settings["agreement_with_itself"] == agreement
