"""The least the same work can cost: one generate call, then forwards in batches of equal length sorted by size.

Nothing is recorded, checked or resumed. Prints one JSON line with the seconds of each phase.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

ROWS = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, help="torch's name")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON list of lists of token ids")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    seconds: dict[str, float] = {}

    start = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    longest = max(map(len, prompts)) + arguments.max_new_tokens + 1
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=longest,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        enforce_eager=current_platform.is_cpu(),  # as compare does
    )
    seconds["engine_start"] = time.monotonic() - start

    start = time.monotonic()
    params = SamplingParams(
        temperature=1.0, max_tokens=arguments.max_new_tokens, logprobs=1, flat_logprobs=True, detokenize=False
    )
    requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params)
    seconds["generation"] = time.monotonic() - start
    sequences = sorted(
        (prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)), key=len
    )
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    del llm

    import torch
    from transformers import AutoModelForCausalLM

    seconds["loads"] = 0.0
    for phase, dtype in (("scoring", arguments.dtype), ("reference", "float32")):
        start = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype)).eval()
        seconds["loads"] += time.monotonic() - start
        start = time.monotonic()
        for first in range(0, len(sequences), ROWS):
            rows = sequences[first : first + ROWS]
            ids = torch.tensor([row + [0] * (len(rows[-1]) - len(row)) for row in rows])
            with torch.no_grad():
                logits = model(ids).logits[:, :-1].float()
            scored = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
            assert scored.shape == ids[:, 1:].shape
        seconds[phase] = time.monotonic() - start
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
