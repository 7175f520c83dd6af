"""A mixture of experts in a real comparison: both sides' choices, a router that was turned, what cannot be read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from tests.command_line import FEW, probe
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

SMALL = ("--prompts", "sums:easy", "--num-prompts", "12", "--max-new-tokens", "24", "--vllm.enforce_eager", "true")
TURNED_LAYER = 1
UNCOMPILED = "{ enforce_eager = false, compilation_config = { mode = 0 } }"
"""An engine that is not said to run eagerly: what it would compile takes longer than all the rest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints: a mixture of experts, and the same with one router turned a little."""
    folder = tmp_path_factory.mktemp("experts")
    for name in ("moe", "turned"):
        make_checkpoint(folder / name, "qwen3-moe")
    path = folder / "turned" / "model.safetensors"
    weights = load_file(path)
    router = weights[f"model.layers.{TURNED_LAYER}.mlp.gate.weight"]
    router += 0.3 * router.std() * torch.randn(router.shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> RunDirectory:
    (folder / "sides.toml").write_text(f"""
pairs = [["fp32", "fp32"], ["bf16", "bf16"], ["fp32", "turned"], ["bf16", "compiled"]]
infer = [
    {{ name = "turned", dtype = "fp32", checkpoint = "{folder / "turned"}" }},
    {{ name = "compiled", dtype = "bf16", args = {UNCOMPILED} }},
]
[experts]
num_sequences = 12
{FEW.read_text()}""")
    out = folder / "run"
    config = folder / "sides.toml"
    probe("compare", "--model", folder / "moe", *SMALL, "--config", config, "--out", out, code=ExitCode.PASS)
    return RunDirectory(out)


def pair(run: RunDirectory, train: str, infer: str) -> PairSummary:
    return next(summary for summary in run.read_summary().pairs if (summary.train, summary.infer) == (train, infer))


def test_in_fp32_both_sides_choose_and_weigh_alike(run: RunDirectory) -> None:
    summary = pair(run, "fp32", "fp32")
    assert summary.verdict.kind == "clean"
    assert summary.metrics["abs_logprob_diff"].value < 1e-5
    assert summary.routing is not None
    assert [layer.layer for layer in summary.routing.layers] == [0, 1]
    assert summary.routing.in_some_layer.value == 0
    assert summary.routing.weight_distance.value < 1e-5
    assert summary.metrics["other_experts"] == summary.routing.other_experts
    assert summary.routing.in_some_layer.num_tokens == summary.counts.num_tokens


def test_in_bf16_rounding_moves_weights_and_turns_near_ties(run: RunDirectory) -> None:
    summary, fp32 = pair(run, "bf16", "bf16"), pair(run, "fp32", "fp32")
    assert summary.verdict.kind == "precision"
    rounded, exact = summary.metrics["kl_k3"].low, fp32.metrics["kl_k3"].high
    assert rounded is not None
    assert exact is not None
    assert rounded > 100 * exact
    routing = summary.routing
    assert routing is not None
    assert 1e-4 < routing.weight_distance.value < 0.1
    assert routing.in_some_layer.value < 0.3


def test_a_router_that_was_turned_is_named_with_its_layer(run: RunDirectory) -> None:
    summary = pair(run, "fp32", "turned")
    assert summary.verdict.kind == "bug"
    named = next(cause for cause in summary.verdict.also if cause.code == "other_experts")
    assert f"from layer {TURNED_LAYER} on" in named.sentence
    assert "from 0 on, choose and weigh alike" in named.evidence[0]
    assert summary.routing is not None
    assert summary.routing.layers[0].other_experts.value == 0
    assert summary.routing.layers[1].other_experts.value > 0.02


def test_an_engine_that_cannot_be_looked_into_is_told_of_and_nothing_fails(run: RunDirectory) -> None:
    summary = pair(run, "bf16", "compiled")
    assert summary.routing is None
    assert "give --vllm.enforce_eager true" in summary.metrics_unavailable["other_experts"]
    assert summary.verdict.kind != "broken"
    page = run.report_path.read_text(encoding="utf-8")
    assert "Do both sides choose the same experts?" in page
    assert "Pairs whose choice of experts was not compared:" in page


def test_of_a_dense_checkpoint_nothing_is_said(folder: Path) -> None:
    out = folder / "dense-run"
    model = make_checkpoint(folder / "dense", "llama")
    probe("compare", "--model", model, "--dtype", "fp32", *SMALL, "--config", FEW, "--out", out, code=ExitCode.PASS)
    run = RunDirectory(out)
    assert not [name for name in run.read_manifest().stages if "routing" in name]
    assert pair(run, "fp32", "fp32").routing is None
    assert "expert" not in str(pair(run, "fp32", "fp32").metrics_unavailable)
    assert "Do both sides choose the same experts?" not in run.report_path.read_text(encoding="utf-8")
