"""A server beside the engine in this process, on the demo checkpoint: a table for reports/server.md.

    python -m benchmarks.server [--num-prompts 32] [--max-new-tokens 64] [--out runs/server]

Starts `vllm serve` in BF16 on this machine's CPU and compares with it, asked at each of its two endpoints, and with the
engine in this process in BF16 and FP32, under equal seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mismatch_probe.notation import write_estimate, write_number
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_table
from mismatch_probe.report.names import pair_label
from tests.servers.real_server import RealServer

SETTINGS = """
pairs = [["bf16", "bf16"], ["fp32", "fp32"], ["bf16", "generate"], ["bf16", "completions"]]
infer = [
    {{ name = "generate", url = "{url}", prefill = true }},
    {{ name = "completions", url = "{url}", args = {{ protocol = "completions" }} }},
]
[model]
path = "demo"
[prompts]
source = "sums:medium"
num_prompts = {num_prompts}
[sampling]
max_new_tokens = {max_new_tokens}
samples_per_prompt = 2
"""

METRICS = ("kl_k3", "abs_logprob_diff", "abs_logprob_diff_max")


def same_as_here(run: RunDirectory, side: str) -> str:
    """Share of responses whose tokens are those of the engine here, and how far log-probs on them are apart (nats)."""
    rollouts, decoded = read_table(run.rollouts_path), {}
    for name in ("bf16", side):
        leg = read_table(run.leg_path(f"infer-{name}-decode"))
        rows = zip(leg["id"].to_pylist(), leg["logprobs"].to_pylist(), strict=True)
        decoded[name] = {row_id.partition("@")[0]: np.asarray(logprobs) for row_id, logprobs in rows}
    tokens: dict[str, dict[str, list[int]]] = {"bf16": {}, side: {}}
    for row_id, sampler, ids in zip(
        *(rollouts[column].to_pylist() for column in ("id", "sampler", "token_ids")), strict=True
    ):
        if (name := sampler.removeprefix("infer-")) in tokens:
            tokens[name][row_id.partition("@")[0]] = ids
    same = [key for key, ids in tokens["bf16"].items() if tokens[side][key] == ids]
    largest_gap = max(
        (float(np.abs(decoded["bf16"][key] - decoded[side][key]).max()) for key in same), default=float("nan")
    )
    return f"{len(same)} of {len(tokens['bf16'])} responses, log-probs at most {write_number(largest_gap)} nats apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RealServer(Path(name) / "log", "--enable-scale-out") as server:
        config, out = Path(name) / "server.toml", arguments.out or Path(name) / "run"
        sizes = {"num_prompts": arguments.num_prompts, "max_new_tokens": arguments.max_new_tokens}
        config.write_text(SETTINGS.format(url=server.url, **sizes))
        began = time.monotonic()
        words = ["compare", "--config", str(config), "--out", str(out)]
        subprocess.run([sys.executable, "-m", "mismatch_probe", *words], check=True)
        run = RunDirectory(out)
        publish(run, time.monotonic() - began)


def publish(run: RunDirectory, seconds: float) -> None:
    stages = run.read_manifest().stages
    print(f"{seconds:.0f} s.\n\n| pair | verdict | {' | '.join(METRICS)} | KL, times bf16/bf16 |\n{'|---' * 6}|")
    for pair in run.read_summary().pairs:
        contrast = pair.settings_contrast
        ratio = "" if contrast is None else write_estimate(contrast.ratios.get("kl_k3"))
        figures = " | ".join(str(write_estimate(pair.metrics.get(name))) for name in METRICS)
        print(f"| {pair_label(pair)} | {pair.verdict.kind}: {pair.verdict.code} | {figures} | {ratio} |")
    print("\n| side | tokens as the engine here | found out by asking |\n|---|---|---|")
    for side in ("generate", "completions"):
        asked_text = json.dumps(stages[f"sample-{side}"].effective_settings["asked"]).strip("{}").replace('"', "")
        print(f"| {side} | {same_as_here(run, side)} | {asked_text} |")


if __name__ == "__main__":
    main()
