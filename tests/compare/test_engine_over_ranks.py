"""An engine that ranks hold: over two nodes, each a torchrun of its own, and over two ranks started here."""

from pathlib import Path

import pytest

import mismatch_probe
from mismatch_probe.errors import ExitCode
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from tests.ports import free_port
from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_python, warm_together

pytestmark = pytest.mark.slow

SIDES = (
    "--train",
    "bf16",
    "--infer",
    "two:dtype=bf16,distributed_executor_backend=external_launcher,tensor_parallel_size=2",
)
SMALL = ("--prompts", "sums:easy", "--num-prompts", 4, "--max-new-tokens", 16, "--vllm.enforce_eager", "true")


def compared(model: Path, out: Path) -> tuple[object, ...]:
    config = out.with_suffix(".toml")
    config.write_text("[floors]\nnum_sequences = 1\n[full_vocabulary]\npositions = 4\n")
    return ("compare", "--model", model, *SMALL, *SIDES, "--reference", "none", "--config", config, "--out", out)


def on_two_nodes(*words: object) -> None:
    meeting = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    nodes = ("--nnodes", 2, "--nproc-per-node", 1, *meeting)
    program = Path(mismatch_probe.__file__).with_name("__main__.py")
    started = ("--start-method", "fork", "--run-path", program, *words)
    answers = warm_together("torch.distributed.run", *((*nodes, "--node-rank", rank, *started) for rank in range(2)))
    assert [answer.returncode for answer in answers] == [ExitCode.PASS] * 2, answers


def test_an_engine_over_two_nodes_samples_what_one_over_two_ranks_here_does(tmp_path: Path) -> None:
    """And an eager engine compiles nothing, which vLLM alone does where ranks share a vocabulary."""
    model = make_checkpoint(tmp_path / "model", "qwen3", num_attention_heads=4, num_key_value_heads=2)
    on_two_nodes(*compared(model, tmp_path / "nodes"))
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    warm_python("mismatch_probe", *compared(model, tmp_path / "here"), environment=cache, every_core=True)
    assert not [path for path in (tmp_path / "compiled").rglob("*") if path.is_file()]
    nodes, here = (RunDirectory(tmp_path / name) for name in ("nodes", "here"))
    assert read_table(nodes.rollouts_path)["token_ids"] == read_table(here.rollouts_path)["token_ids"]
    for leg in ("infer-two-decode", "infer-two-prefill"):
        assert read_table(nodes.leg_path(leg))["logprobs"] == read_table(here.leg_path(leg))["logprobs"]
    [pair] = nodes.read_summary().pairs
    assert pair.counts.num_sequences == 4
    assert 0 < pair.metrics["abs_logprob_diff"].value < 0.1
    assert "full_kl" in pair.metrics
    settings = nodes.read_manifest().stages["sample-two"].effective_settings
    assert settings["tensor_parallel_size"] == 2
    assert nodes.read_manifest().stages["score-train-bf16"].effective_settings["ranks"]["ranks"] == 2
