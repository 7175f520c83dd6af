"""Quantised weights in a real comparison: of one source on both sides, and of two."""

import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from tests.command_line import probe
from tests.this_cpu import needs_fp8_weights
from tests.tiny_models import make_checkpoint, quantise_blocks

pytestmark = pytest.mark.slow

SHAPE = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
    "num_hidden_layers": 1,
}
"""One block a matrix: a product in FP8 takes this processor a tenth of a second."""
SMALL = ("--prompts", "sums:easy", "--num-prompts", "4", "--max-new-tokens", "8", "--vllm.enforce_eager", "true")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("quantised")
    model = make_checkpoint(folder / "plain", "llama", **SHAPE)
    stored = quantise_blocks(make_checkpoint(folder / "fp8", "llama", **SHAPE))
    (folder / "sides.toml").write_text(f"""
pairs = [["bf16", "rounds"], ["expanded", "stored"], ["expanded", "rounds"]]
train = [{{ name = "expanded", dtype = "bf16", checkpoint = "{stored}" }}]
infer = [
    {{ name = "rounds", dtype = "bf16", args = {{ quantization = "fp8_per_channel" }} }},
    {{ name = "stored", dtype = "bf16", checkpoint = "{stored}" }},
]
[floors]
num_sequences = 1
[full_vocabulary]
positions = 4
""")
    out = folder / "run"
    probe("compare", "--model", model, *SMALL, "--config", folder / "sides.toml", "--out", out, code=ExitCode.PASS)
    return RunDirectory(out)


@needs_fp8_weights
def test_each_side_says_what_it_quantises_and_from_which_weights(run: RunDirectory) -> None:
    stages = run.read_manifest().stages
    facts = {name: record.effective_settings.get("quantized") for name, record in stages.items()}
    assert facts["score-train-bf16"] is None
    sources = [(facts[f"sample-{side}"]["source"], facts[f"sample-{side}"]["read_as"]) for side in ("rounds", "stored")]
    assert sources == [("at load", "bf16"), ("checkpoint", None)]
    assert (facts["score-train-expanded"]["source"], facts["score-train-expanded"]["expanded"]) == ("checkpoint", True)


@needs_fp8_weights
def test_one_source_is_told_from_two(run: RunDirectory) -> None:
    facts = [finding.what for finding in run.read_summary().preflight if finding.setting == "quantized"]
    assert len(facts) == 2
    assert any("the engine's are the same ones" in sentence for sentence in facts)
    assert any(
        "another source's: rounded by the engine at load from bf16, to which it rounds the" in sentence
        for sentence in facts
    )
    page = run.report_path.read_text(encoding="utf-8")
    assert "as the checkpoint stores them" in page
