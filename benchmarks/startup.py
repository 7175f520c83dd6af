"""What starting costs: wall time of a small comparison, and of a larger one against the plain script, in one run.

    python -m benchmarks.startup [--repeats 3] [--num-prompts 512] [--max-new-tokens 64]

The small comparison is `compare --model demo --prompts sums:medium --num-prompts 8 --max-new-tokens 64 --dtype bf16`.
Its stages are what is work; the rest of its wall time is start-up, preparation and report. The larger one takes three
dtypes on short prompts, with its prefill leg, floors and full-vocabulary check, against the sum of the plain script's
wall times in each dtype, whose engine runs eagerly on a CPU, too. They take turns.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.compare_cost.__main__ import HERE, measured
from mismatch_probe.config.model import ModelSettings, PromptSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.tasks import encode_prompts, load_prompts, load_tokenizer, resolve_model

DTYPES: tuple[Dtype, ...] = (Dtype.BF16, Dtype.FP16, Dtype.FP32)
SOURCE = "sums:medium"


def compare_seconds(dtypes: tuple[Dtype, ...], num_prompts: int, max_new_tokens: int, out: Path) -> tuple[float, float]:
    """Wall seconds of a comparison, and those of its stages."""
    words = ["compare", "--model", "demo", "--prompts", SOURCE, "--num-prompts", str(num_prompts), "--out", str(out)]
    words += ["--max-new-tokens", str(max_new_tokens)]
    words += [word for dtype in dtypes for word in ("--dtype", dtype)]
    wall, *_ = measured([sys.executable, "-m", "mismatch_probe", *words])
    return wall, sum(stage.seconds for stage in RunDirectory(out).read_manifest().stages.values())


def script_seconds(model: str, dtype: Dtype, prompts: Path, max_new_tokens: int) -> float:
    words = [str(HERE / "plain_script.py"), "--model", model, "--dtype", dtype.torch_name, "--prompts", str(prompts)]
    return measured([sys.executable, *words, "--max-new-tokens", str(max_new_tokens)])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    model = str(resolve_model(ModelSettings(path="demo")))
    settings = PromptSettings(source=SOURCE, num_prompts=arguments.num_prompts)
    prompts = encode_prompts(load_prompts(settings), load_tokenizer(model), settings.chat_template)
    small, large, ratios = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = folder / "prompts.json"
        ids.write_text(json.dumps([prompt.token_ids for prompt in prompts]))
        for repeat in range(arguments.repeats):
            small.append(compare_seconds((Dtype.BF16,), 8, 64, folder / f"small-{repeat}"))
            print(f"8 prompts, bf16: {small[-1]}", file=sys.stderr, flush=True)
            limit = arguments.max_new_tokens
            large.append(compare_seconds(DTYPES, len(prompts), limit, folder / f"large-{repeat}"))
            plain = sum(script_seconds(model, dtype, ids, limit) for dtype in DTYPES)
            ratios.append(large[-1][0] / plain)
            print(f"{len(prompts)} prompts: {large[-1]}, the plain script {plain:.1f}", file=sys.stderr, flush=True)
    print("| | wall, s | of it stages, s | wall over the plain script's |")
    print("|---|---|---|---|")
    for label, seconds, ratio in (
        ("8 prompts, bf16", small, ""),
        (f"{len(prompts)} prompts, {len(DTYPES)} dtypes", large, f"{median(ratios):.2f}"),
    ):
        wall, work = (median(column) for column in zip(*seconds, strict=True))
        print(f"| {label} | {wall:.1f} | {work:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
