"""`mismatch-probe localize` end to end, and its answers to bad input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.cli import progress
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import LocalizeSettings, values_of_pair
from mismatch_probe.config.load import parse_settings
from mismatch_probe.errors import UsageError
from mismatch_probe.records.findings import Localization
from tests.command_line import Answer, probe
from tests.this_cpu import needs_fp8_cache


def run(*words: str) -> Answer:
    return probe("localize", *words)


@pytest.mark.slow
def test_the_demo_model_from_prompts_to_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    shape = ("--num-prompts", "4", "--max-new-tokens", "16")
    done = run("--model", "demo", "--dtype", "bf16", "--modules", *shape, "--out", str(out), "--json")
    assert done.returncode == 0, done
    document: dict[str, Any] = json.loads(done.stdout)
    assert document == json.loads((out / "localize-bf16-bf16.json").read_text())
    assert {path.name for path in out.iterdir()} == {".lock", "localize-bf16-bf16.json", "report.html"}
    found = Localization.model_validate(document)
    assert found.schema_version == 1
    assert [block.train_name for block in found.blocks] == [f"model.layers.{layer}" for layer in range(4)]
    assert [block.infer_name for block in found.blocks] == [f"model.layers.{layer}" for layer in range(4)]
    assert found.first_difference == "model.layers.0.self_attn.rotary_emb[q]"
    assert found.unmatched == []
    assert found.suspects == []
    assert found.kl_k3 is not None
    assert found.interventions is not None
    tried = {(one.side, one.part) for one in found.interventions.ranked}
    assert {("infer", "lm_head"), ("train", "lm_head"), ("train", "layer 3"), ("train", "everything")} <= tried
    assert "The sides first differ at model.layers.0.self_attn.rotary_emb[q]" in done.stderr
    last_part = r"part (\d+) of \1 in FP32: "
    for how_far in ("starting vLLM", "4 of 4 responses sampled", last_part, "loading the FP32 reference"):
        assert re.search(rf"^part [12] of 2: .*, {how_far}", done.stderr, re.MULTILINE), how_far


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "infer"),
    [("bf16", "fp32"), ("fp16", "bf16")],
)
def test_rounding_in_two_formats_accuses_nobody(train: str, infer: str) -> None:
    shape = ("--num-prompts", "4", "--max-new-tokens", "12", "--modules", "--no-interventions", "--json")
    done = run("--model", "demo", "--train-dtype", train, "--infer-dtype", infer, *shape)
    assert done.returncode == 0, done
    assert Localization.model_validate_json(done.stdout).suspects == []


@pytest.mark.slow
@needs_fp8_cache
def test_a_kv_cache_in_8_bits_is_what_removes_its_mismatch() -> None:
    shape = ("--num-prompts", "4", "--max-new-tokens", "24", "--train-dtype", "fp32", "--infer-dtype", "bf16", "--json")
    done = run("--model", "demo", "--vllm.kv_cache_dtype", "fp8", *shape)
    assert done.returncode == 0, done
    found = Localization.model_validate_json(done.stdout).interventions
    assert found is not None
    assert found.ranked[0].part == "KV cache in the model's format"
    assert found.ranked[0].removed.value > 0.9
    assert ("infer", "lm_head") in {(one.side, one.part) for one in found.ranked}
    assert "training path" in found.left_out


@pytest.mark.slow
def test_a_side_that_cannot_start_ends_with_its_own_sentence(tmp_path: Path) -> None:
    done = run("--model", "demo", "--num-prompts", "1", "--vllm.kv_cache_memory_bytes", "1024")
    assert done.returncode == 4
    assert "VLLM_CPU_KVCACHE_SPACE" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model to look into"),
        (("--model", "demo", "--dtype", "bf16", "--train-dtype", "fp16"), "--dtype sets both sides"),
        (("--model", "demo", "--dtype", "int3"), "int3"),
        (("--model", "demo", "--num-prompts", "0"), "num_prompts"),
        (
            ("--model", "demo", "--vllm.tensor_parallel_size", "2"),
            "--vllm.tensor_parallel_size divides the engine over",
        ),
        (
            ("--model", "demo", "--vllm.distributed_executor_backend", "external_launcher"),
            "--vllm.distributed_executor_backend divides the engine over several; leave it out",
        ),
        (
            (
                "--model",
                "/nowhere/at/all",
            ),
            "does not exist",
        ),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("mismatch-probe: ")
    assert "Traceback" not in done.stderr


def test_sampling_other_than_the_models_own_is_refused() -> None:
    with pytest.raises(ValueError, match="leave temperature"):
        LocalizeSettings.model_validate({"model": {"path": "demo"}, "sampling": {"temperature": 0.5}})


def test_a_pair_of_sides_has_their_own_settings_and_a_name_of_its_own() -> None:
    given = {
        "model": {"path": "m"},
        "train": [{"name": "cast", "dtype": "fp16", "precision": "autocast"}],
        "infer": [
            {"name": "fp8kv", "dtype": "bf16", "args": {"kv_cache_dtype": "fp8"}},
            {"name": "stale", "dtype": "bf16", "checkpoint": "last"},
        ],
        "pairs": [["cast", "fp8kv"], ["bf16", "bf16"], ["bf16", "stale"]],
    }
    compared = parse_settings(CompareSettings, given)
    settings = parse_settings(LocalizeSettings, values_of_pair(compared, "cast/fp8kv"))
    assert (settings.train_dtype, settings.infer_dtype) == ("fp16", "bf16")
    assert (settings.training.precision, settings.engine.args) == ("autocast", {"kv_cache_dtype": "fp8"})
    assert settings.names == ("cast", "fp8kv")
    of_dtypes = parse_settings(LocalizeSettings, values_of_pair(compared, "bf16/bf16"))
    assert (of_dtypes.pair, of_dtypes.names) == (None, ("bf16", "bf16"))
    with pytest.raises(UsageError, match="none of the run's; give one of cast/fp8kv, bf16/bf16, bf16/stale"):
        values_of_pair(compared, "cast/bf16")
    with pytest.raises(UsageError, match="looks into one checkpoint on both sides, and stale loads last"):
        values_of_pair(compared, "bf16/stale")
    plain = {pair: compared.has_plain_weights(pair) for pair in compared.pairs}
    assert plain == {("cast", "fp8kv"): True, ("bf16", "bf16"): True, ("bf16", "stale"): False}
    adapted = parse_settings(CompareSettings, given | {"training": {"adapter": "a"}})
    assert not adapted.has_plain_weights(("bf16", "bf16"))
    with pytest.raises(UsageError, match="localize looks into plain weights"):
        parse_settings(LocalizeSettings, values_of_pair(adapted, "bf16/bf16"))


@pytest.mark.parametrize("words", [("--pair", "a/b"), ("--pair", "a/b", "--run", ".", "--dtype", "bf16")])
def test_a_pair_without_a_run_or_with_a_dtype_is_refused(words: tuple[str, ...]) -> None:
    refused = run(*words)
    assert (refused.returncode, "--pair names two sides of --run" in refused.stderr) == (2, True)
