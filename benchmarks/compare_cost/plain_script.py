"""What a person would write instead of `compare`: vLLM generates, then one transformers forward a sequence.

Prints one JSON line with the seconds of each phase: engine start, generation, model loads, scoring.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


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
    params = SamplingParams(temperature=1.0, max_tokens=arguments.max_new_tokens, logprobs=1)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: Any = llm.generate(requests, params)
    responses = [list(output.outputs[0].token_ids) for output in outputs]
    engine_logprobs = [
        [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response, strict=True)]
        for output, response in zip(outputs, responses, strict=True)
    ]
    seconds["generation"] = time.monotonic() - start
    del llm

    import torch
    from transformers import AutoModelForCausalLM

    seconds["loads"] = 0.0
    differences = []
    for phase, dtype in (("scoring", arguments.dtype), ("reference", "float32")):
        start = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype)).eval()
        seconds["loads"] += time.monotonic() - start
        start = time.monotonic()
        for prompt, response, sampled in zip(prompts, responses, engine_logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0].float()
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            scored = logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
            differences.append((scored - torch.tensor(sampled)).abs().mean().item())
        seconds[phase] = time.monotonic() - start
    tokens = sum(map(len, responses))
    print(json.dumps({"seconds": seconds, "tokens": tokens, "mean_abs_diff": sum(differences) / len(differences)}))


if __name__ == "__main__":
    main()
