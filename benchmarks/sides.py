"""Fifteen pairs in one run on one checkpoint, each planted difference named: a table for reports/sides.md.

    python -m benchmarks.sides [--model demo] [--num-prompts 12] [--without SIDE ...] [--out runs/sides]

Planted: an FP8 cache in BF16 and in FP32, a compiled engine, two ranks, weights in FP8, every weight off by 0.3 %, an
epsilon in config.json alone, a LoRA adapter on both sides, merged on one, and on one side alone. FP8
weights are computed slowly on a CPU: most of the time is theirs. `--without` leaves out sides that the machine cannot
compute, such as the FP8 caches on a CPU without AVX-512, with their pairs. Of a pretrained checkpoint the adapter's
default weights leave a model that FP32 does not compute to 0.005 nats, which the verdict says; `--adapter-std 0.02`
leaves a usual one.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mismatch_probe.config.model import ModelSettings
from mismatch_probe.dtypes import sides_label
from mismatch_probe.notation import write_estimate
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.names import pair_label
from mismatch_probe.tasks import resolve_model
from tests.adapters import make_adapter

OFF_BY = 0.003
EPSILON = 1e-3
BY_ROUNDING = {True: "yes", False: "no", None: ""}

SETTINGS = """
pairs = [
    ["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"], ["bf16", "compiled"], ["bf16", "two-ranks"],
    ["bf16", "fp8kv"], ["bf16", "fp8weights"], ["bf16", "stale"], ["autocast", "bf16"],
    ["bf16", "epsilon"], ["fp32", "fp8kv32"],
    ["lora", "lora"], ["merged", "lora"], ["lora32", "lora32"], ["bf16", "lora"],
]
infer = [
    {{ name = "compiled", dtype = "bf16", args = {{ enforce_eager = false }} }},
    {{ name = "two-ranks", dtype = "bf16", args = {{ tensor_parallel_size = 2 }} }},
    {{ name = "fp8kv", dtype = "bf16", args = {{ kv_cache_dtype = "fp8" }} }},
    {{ name = "fp8weights", dtype = "bf16", args = {{ quantization = "fp8_per_channel" }} }},
    {{ name = "stale", dtype = "bf16", checkpoint = "{stale}" }},
    {{ name = "epsilon", dtype = "bf16", checkpoint = "{epsilon}" }},
    {{ name = "fp8kv32", dtype = "fp32", args = {{ kv_cache_dtype = "fp8" }} }},
    {{ name = "lora", dtype = "bf16", adapter = "{adapter}" }},
    {{ name = "lora32", dtype = "fp32", adapter = "{adapter}" }},
]
train = [
    {{ name = "autocast", dtype = "bf16", precision = "autocast" }},
    {{ name = "lora", dtype = "bf16", adapter = "{adapter}" }},
    {{ name = "merged", dtype = "bf16", adapter = "{adapter}", adapter_merged = true }},
    {{ name = "lora32", dtype = "fp32", adapter = "{adapter}" }},
]
[model]
path = "{model}"
[prompts]
source = "{prompts}"
num_prompts = {num_prompts}
[sampling]
max_new_tokens = {max_new_tokens}
[floors]
num_sequences = {num_floors}
[full_vocabulary]
positions = 12
"""


def stale_weights(source: Path, folder: Path) -> Path:
    """A copy of the checkpoint with every weight off by OFF_BY, in its own format."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        moved = {
            name: (weight.float() * (1 + OFF_BY * torch.randn(weight.shape, generator=generator))).to(weight.dtype)
            for name, weight in load_file(path).items()
        }
        save_file(moved, path, metadata={"format": "pt"})
    return folder


def other_epsilon(source: Path, folder: Path) -> Path:
    """A copy of the checkpoint with the same weights and another epsilon of its norms."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": EPSILON}))
    return folder


def without(settings: str, sides: Sequence[str]) -> str:
    """The settings without some sides, and without the pairs that they are in."""
    content = tomllib.loads(settings)
    content["pairs"] = [pair for pair in content["pairs"] if not set(pair) & set(sides)]
    named = {name for pair in content["pairs"] for name in pair}
    for role in ("infer", "train"):
        content[role] = [side for side in content[role] if side["name"] in named]
    return json.dumps(content)


def row(pair: PairSummary, planted: Path) -> str:
    contrast = pair.settings_contrast
    settings = "" if contrast is None else ", ".join(contrast.settings).replace(f"{planted}/", "")
    ratio = (
        ""
        if contrast is None
        else f"{write_estimate(contrast.ratios.get('kl_k3'))} of {sides_label(*contrast.counterpart)}"
    )
    verdict = f"{pair.verdict.kind}: {pair.verdict.code}"
    by_rounding = BY_ROUNDING[None if contrast is None else contrast.is_rounding]
    kl = write_estimate(pair.metrics.get("kl_k3"))
    return f"| {pair_label(pair)} | {verdict} | {kl} | {settings} | {ratio} | {by_rounding} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", default="sums:medium")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--num-floors", type=int, default=4, help="responses that are scored again as floors")
    parser.add_argument("--adapter-std", type=float, default=0.1, help="of the adapter's weights; less for a real one")
    parser.add_argument("--without", nargs="*", default=[], metavar="SIDE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    source = resolve_model(ModelSettings(path=arguments.model))
    with tempfile.TemporaryDirectory() as name:
        planted = Path(name)
        settings = SETTINGS.format(
            stale=stale_weights(source, planted / "stale"),
            epsilon=other_epsilon(source, planted / "epsilon"),
            adapter=make_adapter(planted / "adapter", source, std=arguments.adapter_std),
            model=arguments.model,
            prompts=arguments.prompts,
            num_prompts=arguments.num_prompts,
            max_new_tokens=arguments.max_new_tokens,
            num_floors=arguments.num_floors,
        )
        (planted / "sides.yaml").write_text(without(settings, arguments.without))
        out = arguments.out or planted / "run"
        words = ["compare", "--config", str(planted / "sides.yaml"), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "mismatch_probe", *words], check=True)
        summary = RunDirectory(out).read_summary()
        print(summary.headline)
        print("| pair | verdict | KL (k3) a token | set otherwise | KL, times that | rounding makes as much |")
        print("|---|---|---|---|---|---|")
        for pair in summary.pairs:
            print(row(pair, planted))
        for pair in summary.pairs:
            print(f"{pair_label(pair)}: {pair.verdict.sentence}")


if __name__ == "__main__":
    main()
