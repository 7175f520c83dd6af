"""A checkpoint that FP32 cannot compute, on the real engine: no bug, unless a fault goes beyond FP32's own rounding."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.fault_lab.in_log import Edit, edit_leg
from mismatch_probe.compare import run as run_module
from mismatch_probe.compare.plan import PlannedJob
from mismatch_probe.compare.run import execute
from mismatch_probe.compare.summarise import summarise
from mismatch_probe.errors import ExitCode, OutOfMemory
from mismatch_probe.records.manifest import StageRecord
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from tests.command_line import FEW, probe
from tests.compare.test_compare import halting, recorded
from tests.halts import is_begun, wait_until
from tests.importing.from_run import log_of_run
from tests.importing.logs import write
from tests.processes import wait_until_gone

pytestmark = pytest.mark.slow

CANCELLED = 1.0e4
"""How large the terms of a sum are that cancel, in standard deviations of what remains."""
FP64_STAGE = "score-ref-fp64"
SMALL = ("--prompts", "sums:easy", "--num-prompts", "10", "--max-new-tokens", "16", "--chat-template", "never")


@pytest.fixture(scope="module")
def amplifying(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose MLPs add large terms that cancel: what is left holds few digits, and hangs on their order."""
    folder: Path = shutil.copytree(llama, tmp_path_factory.mktemp("checkpoints") / "amplifying")
    path = folder / "model.safetensors"
    weights = {name: weight.float() for name, weight in load_file(path).items()}
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith("down_proj.weight")]:
        down = weights[name]
        half = down.shape[1] // 2
        for other in ("gate_proj", "up_proj"):
            rows = weights[name.replace("down_proj", other)]
            rows[half:] = rows[:half]
        terms = CANCELLED * down.std() * torch.randn(down[:, :half].shape, generator=generator)
        down[:, :half] += terms
        down[:, half:] -= terms
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def run(amplifying: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Whose training path scores in several batches."""
    out = tmp_path_factory.mktemp("ill-conditioned") / "run"
    config = out.with_name("batches.toml")
    config.write_text("[training]\nbatch_tokens = 128\n" + FEW.read_text())
    words = ("--dtype", "bf16", "--dtype", "fp32", "--config", config, "--out", out)
    probe("compare", "--model", amplifying, *SMALL, *words, code=ExitCode.PASS)
    return RunDirectory(out)


@pytest.fixture
def copied(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(run.path, tmp_path / "run"))


def judged(run: RunDirectory) -> dict[str, PairSummary]:
    return {pair.train: pair for pair in summarise(run, run.read_manifest()).pairs}


def codes(run: RunDirectory) -> dict[str, tuple[str, str]]:
    return {name: (pair.verdict.kind, pair.verdict.code) for name, pair in judged(run).items()}


def moved(nats: float, *, where: Callable[[int], bool] = lambda place: True) -> Edit:
    """Log-probs with an error of their own at some places of the response."""

    def edit(rows: list[dict[str, Any]]) -> None:
        generator = np.random.default_rng(0)
        for row in rows:
            values = np.asarray(row["logprobs"])
            errors = nats * generator.normal(size=values.size) * [where(place) for place in range(values.size)]
            row["logprobs"] = np.minimum(values + errors, 0.0).tolist()

    return edit


def test_no_side_of_an_ill_conditioned_model_is_accused(run: RunDirectory) -> None:
    manifest, summary = run.read_manifest(), run.read_summary()
    assert manifest.rounding_checks == ["fp32"]
    assert manifest.stages[FP64_STAGE].state == "done"
    assert codes(run) == dict.fromkeys(("bf16", "fp32"), ("precision", "ill_conditioned"))
    measured = judged(run)["fp32"].conditioning
    assert measured is not None
    assert measured.error_fp32.value > 1e-4
    assert measured.error_mu.value < 4 * measured.error_fp32.value
    assert "nats a token from FP64 on this checkpoint" in summary.headline
    assert summary.headline.startswith("No bug. ")
    shown = probe("report", run.path, code=ExitCode.PASS).stdout
    assert "FP32 and FP64" in shown
    assert "nats a token from FP64" in run.path.joinpath("report.html").read_text()


@pytest.mark.parametrize("leg", ["infer-fp32-decode", "train-fp32"])
@pytest.mark.parametrize("fault", [moved(0.5), moved(1.0, where=lambda place: place >= 10)])
def test_a_fault_beyond_rounding_of_fp32_is_a_bug_on_either_side(copied: RunDirectory, leg: str, fault: Edit) -> None:
    edit_leg(copied, leg, fault)
    assert {kind for kind, _ in codes(copied).values()} == {"bug"}
    evidence = judged(copied)["fp32"].verdict.evidence
    assert any("nats a token from FP64 on this checkpoint" in line for line in evidence)


def test_without_fp64_the_healthy_model_would_be_called_a_bug(copied: RunDirectory) -> None:
    manifest = copied.read_manifest()
    manifest.rounding_checks.clear()
    assert {pair.verdict.kind for pair in summarise(copied, manifest).pairs} == {"bug"}


def without_fp64(run: RunDirectory) -> None:
    """The run as it was before FP64 was scored."""
    manifest = run.read_manifest()
    manifest.rounding_checks.clear()
    del manifest.stages[FP64_STAGE]
    run.write_manifest(manifest)
    run.leg_path("ref-fp64").unlink()


def test_a_run_that_is_resumed_measures_what_it_lacks_or_failed_at_and_no_more(
    copied: RunDirectory, amplifying: Path
) -> None:
    before = copied.read_summary()
    without_fp64(copied)
    scored = []
    execute(copied, lambda event: scored.append(getattr(event, "stage", None)))
    assert set(scored) - {None} == {FP64_STAGE}
    assert copied.read_summary() == before
    manifest = copied.read_manifest()
    manifest.stages[FP64_STAGE] = StageRecord(state="skipped", note="the model in FP64 takes more memory than is free")
    copied.write_manifest(manifest)
    copied.leg_path("ref-fp64").unlink()
    probe("compare", "--out", copied.path, "--resume", code=ExitCode.PASS)
    assert copied.read_summary() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_within_fp64_goes_on_from_its_batches_to_the_same_bytes(
    copied: RunDirectory, tmp_path: Path, number: signal.Signals
) -> None:
    before = recorded(copied.path)
    without_fp64(copied)
    copied.summary_path.unlink()
    others = {leg: leg.stat().st_mtime_ns for leg in (copied.path / "legs").iterdir()}
    with halting(f"after-part:{FP64_STAGE}", tmp_path, "--out", copied.path, "--resume") as process:
        wait_until(lambda: is_begun(copied.path, FP64_STAGE), "the first batch in FP64", process)
        os.kill(process.pid, number)
        assert process.wait() == (ExitCode.INTERRUPTED if number == signal.SIGINT else -number)
        wait_until_gone(tmp_path)
    assert not copied.summary_path.exists()
    answer = probe("compare", "--out", copied.path, "--resume", code=ExitCode.PASS)
    assert re.search("the FP64 reference scores the responses, 1 of [2-9] batches recorded", answer.stderr)
    assert "the FP32 reference scores" not in answer.stderr
    assert {leg: leg.stat().st_mtime_ns for leg in others} == others, "nothing else is computed again"
    assert recorded(copied.path) == before


def scored_log(run: RunDirectory, model: Path, folder: Path, nats: float) -> RunDirectory:
    """The log of the run's FP32 pair, the engine's log-probs moved by so much, scored with the checkpoint."""
    rows, generator = log_of_run(run, "fp32"), np.random.default_rng(0)
    for row in rows:
        errors = nats * generator.normal(size=len(row["logprobs"]))
        row["logprobs"] = np.minimum(np.asarray(row["logprobs"]) + errors, 0.0).tolist()
    dtypes = ("--train-dtype", "fp32", "--infer-dtype", "fp32")
    probe("import", write(folder / "log.jsonl", rows), *dtypes, "--out", folder / "log")
    probe("score", folder / "log", "--model", model, "--no-engine", "--out", folder / "scored", code=ExitCode.PASS)
    return RunDirectory(folder / "scored")


def test_a_log_of_such_a_model_is_accused_of_nothing(run: RunDirectory, amplifying: Path, tmp_path: Path) -> None:
    scored = scored_log(run, amplifying, tmp_path, 0.0)
    assert scored.read_manifest().rounding_checks == ["fp32"]
    verdicts = [pair.verdict for pair in scored.read_summary().pairs]
    assert not [verdict.sentence for verdict in verdicts if verdict.kind == "bug" or verdict.code == "other_checkpoint"]


def test_a_log_of_such_a_model_with_a_fault_is_accused(run: RunDirectory, amplifying: Path, tmp_path: Path) -> None:
    summary = scored_log(run, amplifying, tmp_path, 0.3).read_summary()
    (computed,) = (pair for pair in summary.pairs if pair.train == "fp32")
    assert computed.verdict.kind == "bug"
    assert any("nats a token from FP64 on this checkpoint" in line for line in computed.verdict.evidence)


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs that measure rounding find no memory."""
    real = run_module.run_planned_job

    def run_job(run: RunDirectory, job: PlannedJob, on_event: Any) -> None:
        if job.is_rounding_check:
            raise OutOfMemory("the model in FP64 takes more memory than is free")
        real(run, job, on_event)

    monkeypatch.setattr(run_module, "run_planned_job", run_job)
    return iter(())


@pytest.mark.usefixtures("without_memory")
def test_where_fp64_fails_the_run_ends_undecided_and_says_why(copied: RunDirectory) -> None:
    without_fp64(copied)
    summary = execute(copied, lambda event: None)
    assert {pair.verdict.kind for pair in summary.pairs} == {"undecided"}
    assert "could not be computed in FP64: the model in FP64 takes more memory than is free" in summary.headline
    assert copied.read_manifest().stages[FP64_STAGE].state == "skipped"
    assert execute(copied, lambda event: None) == summary


@pytest.mark.parametrize(
    ("table", "change", "fact"),
    [("reference", {"by_layer": True}, "by_layer"), ("training", {"ranks": 2}, "ranks")],
    ids=["layer by layer", "over ranks"],
)
def test_fp64_layer_by_layer_and_over_ranks_measures_the_same(
    copied: RunDirectory, table: str, change: dict[str, Any], fact: str
) -> None:
    """On the recorded responses: neither changes what the run would have sampled or scored."""
    before = judged(copied)["fp32"].conditioning
    assert before is not None
    without_fp64(copied)
    manifest = copied.read_manifest()
    values = getattr(manifest.settings, table).model_copy(update=change)
    manifest.settings = manifest.settings.model_copy(update={table: values})
    copied.write_manifest(manifest)
    execute(copied, lambda event: None)
    record = copied.read_manifest().stages[FP64_STAGE]
    assert record.state == "done", record.note
    assert record.effective_settings[fact]
    after = judged(copied)["fp32"].conditioning
    assert after is not None
    assert after.error_fp32.value == pytest.approx(before.error_fp32.value, rel=1e-6)
    assert codes(copied) == dict.fromkeys(("bf16", "fp32"), ("precision", "ill_conditioned"))


def test_a_reference_in_fp64_is_used_and_not_computed_twice(amplifying: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--dtype", "fp32", "--reference", "fp64", "--config", FEW, "--out", out)
    probe("compare", "--model", amplifying, *SMALL, *words, code=ExitCode.PASS)
    run = RunDirectory(out)
    assert codes(run) == {"fp32": ("precision", "ill_conditioned")}
    assert [name for name in run.read_manifest().stages if name.startswith("score-ref")] == [
        FP64_STAGE,
        "score-ref-fp32",
    ]


def test_a_sound_model_is_scored_in_no_other_format(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--dtype", "fp32", "--config", FEW, "--out", out)
    probe("compare", "--model", llama, *SMALL, *words, code=ExitCode.PASS)
    run = RunDirectory(out)
    assert codes(run) == {"fp32": ("clean", "clean")}
    assert run.read_manifest().rounding_checks == []
    assert FP64_STAGE not in run.read_manifest().stages
    assert run.read_summary().pairs[0].conditioning is None
