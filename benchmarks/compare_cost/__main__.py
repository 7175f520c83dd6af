"""`compare` against the plain script and the floor, on the same prompts: wall and processor time, and peak memory.

    python -m benchmarks.compare_cost [--num-prompts 32] [--max-new-tokens 1024] [--dtype bf16] [--repeats 1]

All three generate, score on the training path and score in FP32, each with its own thread settings; `compare` records,
checks and summarises besides. Its prefill leg, floors and full-vocabulary check are left out: the others have none.
Phases leave start-up out (imports, engine start, loads).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mismatch_probe.config.model import ModelSettings, PromptSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.tasks import encode_prompts, load_prompts, load_tokenizer, resolve_model

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cost:
    """Phases are seconds a response token, since unseeded responses differ a little in length."""

    wall_seconds: float
    processor_seconds: float
    peak_bytes: int
    generation: float
    scoring: float
    reference: float

    @property
    def work(self) -> float:
        return self.generation + self.scoring + self.reference


def measured(command: list[str]) -> tuple[float, float, int, str]:
    """Wall seconds, processor seconds, peak bytes of the largest process, and stdout of a command."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=output, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.monotonic() - start
        if status:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
        output.seek(0)
        return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output.read()


def script_cost(name: str, model: str, dtype: Dtype, prompts: Path, max_new_tokens: int) -> Cost:
    command = [sys.executable, str(HERE / f"{name}.py"), "--model", model, "--dtype", dtype.torch_name]
    command += ["--prompts", str(prompts), "--max-new-tokens", str(max_new_tokens)]
    wall, processor, peak_bytes, output = measured(command)
    answer = json.loads(output.splitlines()[-1])
    seconds, tokens = answer["seconds"], answer["tokens"]
    phases = (seconds[phase] / tokens for phase in ("generation", "scoring", "reference"))
    return Cost(wall, processor, peak_bytes, *phases)


def compare_cost(model: str, dtype: Dtype, source: str, num_prompts: int, max_new_tokens: int, folder: Path) -> Cost:
    config = folder / "run.toml"
    config.write_text(
        f"[engine]\nprefill = false\nbatch_sequences = {num_prompts}\n[reference]\nrounded_weights = false\n"
        "[floors]\nnum_sequences = 0\n[full_vocabulary]\npositions = 0\n"
    )
    out = folder / "run"
    command = [sys.executable, "-m", "mismatch_probe", "compare", "--model", model, "--dtype", dtype, "--out", str(out)]
    command += ["--config", str(config), "--prompts", source, "--num-prompts", str(num_prompts)]
    wall, processor, peak_bytes, _ = measured([*command, "--max-new-tokens", str(max_new_tokens)])
    stages = RunDirectory(out).read_manifest().stages
    phases = [stages[name] for name in (f"sample-{dtype}", f"score-train-{dtype}", "score-ref-fp32")]
    return Cost(wall, processor, peak_bytes, *(stage.seconds / stage.tokens for stage in phases))


def row(name: str, ours: list[Cost], theirs: list[Cost]) -> str:
    def ratio(attribute: str) -> str:
        pairs = zip(ours, theirs, strict=True)
        return f"{median(getattr(item, attribute) / getattr(other, attribute) for item, other in pairs):.2f}"

    attributes = ("wall_seconds", "processor_seconds", "work", "generation", "scoring", "reference", "peak_bytes")
    return f"| {name} | " + " | ".join(ratio(attribute) for attribute in attributes) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", default="sums:long")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--dtype", action="append", type=Dtype.parse)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    model = str(resolve_model(ModelSettings(path=arguments.model)))
    settings = PromptSettings(source=arguments.prompts, num_prompts=arguments.num_prompts)
    prompts = encode_prompts(load_prompts(settings), load_tokenizer(model), settings.chat_template)
    print("| compare over | wall | processor | work, no start-up | generation | scoring pi | reference | peak memory |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in arguments.dtype or ["bf16", "fp16"]:
        ours, plain, floor = [], [], []
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                ids = folder / "prompts.json"
                ids.write_text(json.dumps([prompt.token_ids for prompt in prompts]))
                limit = arguments.max_new_tokens
                plain.append(script_cost("plain_script", model, dtype, ids, limit))
                ours.append(compare_cost(model, dtype, arguments.prompts, len(prompts), limit, folder))
                floor.append(script_cost("floor", model, dtype, ids, limit))
        print(row(f"the plain script, {dtype}", ours, plain))
        print(row(f"the floor, {dtype}", ours, floor), flush=True)
        for name, costs in (("compare", ours), ("plain", plain), ("floor", floor)):
            print(f"  {name} {dtype}: {costs}", file=sys.stderr)


if __name__ == "__main__":
    main()
