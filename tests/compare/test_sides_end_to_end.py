"""Sides with settings of their own on the real engine: each planted difference is named, and sides are added later."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.stats.estimator import contrast
from mismatch_probe.tasks import resolve_model
from tests.command_line import FEW, probe
from tests.this_cpu import KEEPS_FP8, needs_fp8_cache

pytestmark = pytest.mark.slow

SMALL = ("--prompts", "sums:easy", "--num-prompts", "12", "--max-new-tokens", "16")
"""Whether vLLM has kernels for an FP8 cache on this CPU."""


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with every weight off by 1 %."""
    source = resolve_model(ModelSettings(path="demo"))
    folder: Path = shutil.copytree(source, tmp_path_factory.mktemp("checkpoints") / "stale")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    moved = {
        name: (weight.float() * (1 + 0.01 * torch.randn(weight.shape, generator=generator))).to(weight.dtype)
        for name, weight in weights.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def epsilon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with one number of its config.json changed."""
    source = resolve_model(ModelSettings(path="demo"))
    folder: Path = shutil.copytree(source, tmp_path_factory.mktemp("checkpoints") / "epsilon")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return folder


@pytest.fixture(scope="module")
def run(stale: Path, epsilon: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    out = tmp_path_factory.mktemp("sides") / "run"
    config = out.parent / "sides.toml"
    fp8_pair = '["bf16", "fp8kv"],' if KEEPS_FP8 else ""
    fp8_side = '{ name = "fp8kv", dtype = "bf16", args = { kv_cache_dtype = "fp8" } },' if KEEPS_FP8 else ""
    config.write_text(f"""
pairs = [
    ["bf16", "bf16"], ["fp32", "fp32"], {fp8_pair} ["bf16", "stale"], ["bf16", "epsilon"], ["autocast", "bf16"],
]
train = [{{ name = "autocast", dtype = "bf16", precision = "autocast" }}]
infer = [
    {fp8_side}
    {{ name = "stale", dtype = "bf16", checkpoint = "{stale}" }},
    {{ name = "epsilon", dtype = "bf16", checkpoint = "{epsilon}" }},
]
{FEW.read_text()}""")
    probe("compare", "--model", "demo", *SMALL, "--config", config, "--out", out, code=ExitCode.PASS)
    return RunDirectory(out)


def pair(run: RunDirectory, name: str) -> PairSummary:
    return next(summary for summary in run.read_summary().pairs if f"{summary.train}/{summary.infer}" == name)


@needs_fp8_cache
def test_an_fp8_cache_is_named_as_all_that_differs(run: RunDirectory) -> None:
    judged = pair(run, "bf16/fp8kv")
    assert judged.verdict.code == "settings"
    assert "kv_cache_dtype = fp8 is all that differs from BF16, where FP32 agrees" in judged.verdict.sentence
    assert judged.settings_contrast is not None
    ratio = judged.settings_contrast.ratios["kl_k3"]
    assert ratio.low is not None
    assert ratio.low > 1
    stages = run.read_manifest().stages
    caches = [stages[f"sample-{side}"].effective_settings["kv_cache_dtypes"] for side in ("bf16", "fp8kv")]
    assert caches[0] != caches[1]


def test_another_checkpoint_is_named_and_recorded(run: RunDirectory, stale: Path) -> None:
    judged = pair(run, "bf16/stale")
    assert (judged.verdict.kind, judged.verdict.code) == ("bug", "stale_weights")
    assert f"the engine those of {stale.name}: " in judged.verdict.sentence
    found = run.read_manifest().checkpoint_differences[0]
    assert found.weights.num_other == found.weights.num_tensors
    assert found.weights.largest[0].relative == pytest.approx(0.01, rel=0.3)
    assert (found.config, found.tokenizer, found.chat_template) == ({}, [], "")
    assert judged.settings_contrast is not None
    assert judged.settings_contrast.settings == [f"checkpoint = {stale}"]
    manifest = run.read_manifest()
    assert manifest.checkpoints[str(stale)].fingerprint != manifest.model.fingerprint


def test_a_configuration_that_alone_differs_is_named_by_its_key(run: RunDirectory) -> None:
    judged = pair(run, "bf16/epsilon")
    assert (judged.verdict.kind, judged.verdict.code) == ("bug", "configuration")
    assert "rms_norm_eps is 1e-06 on the training path and 0.001 in the engine" in judged.verdict.sentence
    assert not run.read_manifest().checkpoint_differences[1].weights.are_other
    assert not any("weights" in cause.sentence for cause in (judged.verdict, *judged.verdict.also))


def test_the_trainers_precision_is_told_apart_on_the_same_responses(run: RunDirectory) -> None:
    judged = pair(run, "autocast/bf16")
    assert judged.verdict.code == "settings"
    assert judged.settings_contrast is not None
    assert (judged.settings_contrast.side, judged.settings_contrast.settings) == ("pi", ["precision = autocast"])
    paired, apart = judged.settings_contrast.ratios["kl_k3"], pair(run, "bf16/bf16").metrics["kl_k3"]
    unpaired = contrast(judged.metrics["kl_k3"], apart)
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.high / paired.low < unpaired.high / unpaired.low
    assert judged.legs["mu"] == pair(run, "bf16/bf16").legs["mu"]


def test_where_nothing_was_planted_nothing_is_named(run: RunDirectory) -> None:
    assert pair(run, "bf16/bf16").verdict.code in ("precision", "clean")
    assert pair(run, "fp32/fp32").verdict.kind == "clean"
    assert pair(run, "bf16/bf16").settings_contrast is None


def test_the_page_and_the_terminal_name_every_side(run: RunDirectory) -> None:
    page = run.report_path.read_text(encoding="utf-8")
    output = probe("report", run.path).stdout
    fp8 = ("train BF16 / infer fp8kv", "kv_cache_dtype = fp8") if KEEPS_FP8 else ()
    for words in ("train BF16 / infer stale", "train autocast / infer BF16", *fp8):
        assert words in page
        assert words in output


def test_a_side_is_added_later_and_a_gate_judges_it(run: RunDirectory, tmp_path: Path) -> None:
    copied = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    kept = {path.name: path.read_bytes() for path in (copied.path / "legs").iterdir() if "stale" in path.name}
    cached = "cached:dtype=bf16,prefix_caching=true"
    probe("compare", "--resume", "--out", copied.path, "--train", "bf16", "--infer", cached, code=ExitCode.PASS)
    assert {name: copied.leg_path(name.removesuffix(".parquet")).read_bytes() for name in kept} == kept
    names = ["fp8kv"] * KEEPS_FP8 + ["stale", "epsilon", "cached"]
    assert [side.name for side in copied.read_manifest().settings.infer] == names
    blame = pair(copied, "bf16/cached").blame
    assert blame is not None
    assert "mu_other_batch" in blame.floors
    assert "mu_cached" not in blame.floors
    skipped = copied.read_manifest().stages["replay-infer-cached-cached"]
    assert (skipped.state, skipped.note) == (
        "skipped",
        "no prompt fills a block of the prefix cache, which has 128 tokens",
    )
    gate = tmp_path / "gate.toml"
    gate.write_text(
        '[gate]\nmin_sequences = 12\nmin_prompts = 12\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = 1e-6\n'
        'slice = { pair = "bf16/cached" }\n'
    )
    assert "bf16/cached" in probe("gate", copied.path, "--config", gate, "--json", code=ExitCode.GATE_FAILED).stdout


def test_without_a_reference_the_page_says_what_it_cannot_say(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--config", FEW, "--dtype", "bf16", "--dtype", "fp32", "--reference", "none", "--num-prompts", "4")
    probe("compare", "--model", "demo", *SMALL, *words, "--out", out, code=ExitCode.PASS)
    summary = RunDirectory(out).read_summary()
    assert summary.verdict.kind in ("precision", "clean")
    assert all("ref" not in judged.legs for judged in summary.pairs)
    assert "there is no high-precision reference leg" in RunDirectory(out).report_path.read_text(encoding="utf-8")
