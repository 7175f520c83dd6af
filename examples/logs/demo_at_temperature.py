"""Writes the log of a trainer whose sampler recorded its log-probs at temperature 0.7, of the demo checkpoint.

    python examples/logs/demo_at_temperature.py examples/logs/demo-temperature.jsonl

The engine draws at temperature 0.7 in BF16 and records what it drew from; the trainer scores the same tokens at
temperature 1. Each line is a response, in the plain format of docs/logs.md.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mismatch_probe import demo_checkpoint

TEMPERATURE = 0.7
STEP = 12
NUM_PROMPTS, NUM_TERMS, MOST_TOKENS = 32, 10, 96
DIGITS = 5


def main(path: Path) -> None:
    random.seed(0)
    torch.manual_seed(0)
    folder = Path(demo_checkpoint.__file__).parent
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(NUM_PROMPTS):
            terms = " ".join(f"{number + 1}:{random.randint(10, 99)}" for number in range(NUM_TERMS))
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"sum {terms}"}], add_generation_prompt=True, tokenize=False
            )
            file.write(json.dumps(_response(model, tokenizer.encode(text), tokenizer.eos_token_id)) + "\n")


@torch.inference_mode()
def _response(model: Any, prompt: list[int], end: int) -> dict[str, Any]:
    tokens: list[int] = []
    sampled: list[float] = []
    while len(tokens) < MOST_TOKENS and (not tokens or tokens[-1] != end):
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
        log_probs = torch.log_softmax(logits / TEMPERATURE, -1)
        tokens.append(int(torch.multinomial(log_probs.exp(), 1)))
        sampled.append(round(float(log_probs[tokens[-1]]), DIGITS))
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    trained = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return {
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "logprobs": sampled,
        "train_logprobs": [round(value, DIGITS) for value in trained.tolist()],
        "step": STEP,
        "temperature": 1.0,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
