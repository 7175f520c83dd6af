"""How much data the guard `sampling` takes to see settings that an engine hides, on a checkpoint's own responses.

    python -m benchmarks.hidden_on_checkpoint [--prompts 256] [--samples 4] > TABLE

The demo checkpoint answers sums with transformers' own decoding, in FP32, under each hidden setting; log pi and entropy
are those of the same model without it. `benchmarks.hidden_sampling` does the same for made-up distributions, over
entropies; a repetition penalty depends on which tokens a real text repeats, so it is measured here. Steps are drawn
from the responses and judged by the default guard through the code that `train` runs.
"""

import argparse
import math
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.departure_totals import SurpriseTotals
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.guards.rules.mean import MeanSettings
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.tasks.problems import TASKS, ProblemSet, TermRange

HIDDEN: Final[dict[str, dict[str, float]]] = {
    "none": {},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.9": {"top_p": 0.9},
    "repetition penalty 1.2": {"repetition_penalty": 1.2},
}
NEW_TOKENS: Final = 40
SHAPES: Final = {"8 x 4": 32, "32 x 8": 256}
"""Responses of a step."""
LONGEST: Final = 128
"""Steps, the window of the guard, after which a setting counts as not seen."""

Response = tuple[Floats, Floats]
"""log pi and entropy of each token [T]."""


def responses(model: Any, prompts: Any, ends: int, samples: int, hidden: dict[str, float]) -> list[Response]:
    """Of each prompt, sampled under the hidden settings."""
    settings = {"temperature": 1.0, "top_p": 1.0, **hidden}
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=ends, pad_token_id=ends, **settings
    )
    sampled = []
    for part in range(samples):
        torch.manual_seed(part)
        ids = model.generate(**prompts, generation_config=config)
        answers = ids[:, prompts["input_ids"].shape[1] :]
        ended = (answers == ends).int()
        is_answer = ended.cumsum(1) - ended == 0
        mask = torch.cat([prompts["attention_mask"], is_answer.to(prompts["attention_mask"].dtype)], 1)
        logits = model(ids, attention_mask=mask).logits[:, -answers.shape[1] - 1 : -1]
        log_pi = torch.log_softmax(logits.double(), -1)
        chosen = log_pi.gather(-1, answers[..., None])[..., 0]
        entropy = -(log_pi.exp() * log_pi).sum(-1)
        for row, kept in enumerate(is_answer):
            sampled.append((chosen[row, kept].numpy(), entropy[row, kept].numpy()))
    return sampled


def summed(drawn: list[Response]) -> SurpriseTotals:
    log_pi, entropy = (np.concatenate(column) for column in zip(*drawn, strict=True))
    return SurpriseTotals.of(log_pi, entropy)


def first_firing(pool: list[Response], size: int, seed: int) -> int | None:
    """The step at which the guard fires; None where it does not."""
    random = np.random.default_rng(seed)
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "sampling"))
    for step in range(1, LONGEST + 1):
        totals = summed([pool[row] for row in random.integers(0, len(pool), size)])
        if book.evaluate(step, {"mismatch/surprise_mean": totals.mean, "mismatch/surprise_error": totals.error}).events:
            return step
    return None


def tokens_needed(totals: SurpriseTotals) -> str:
    """So that the mean is beyond the guard's tolerance and standard errors, on average."""
    [guard] = [guard for guard in DEFAULT_GUARDS if isinstance(guard, MeanSettings) and guard.name == "sampling"]
    beyond = abs(totals.mean) - guard.tolerance
    spread = totals.error * math.sqrt(totals.tokens)
    return f"{(guard.errors * spread / beyond) ** 2:,.0f}" if beyond > 0 else "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--only", default="", help="settings with this word in their name")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()
    problems = ProblemSet(TASKS["sums"], TermRange(3, 3), seed=0)
    questions = [[{"role": "user", "content": problems.problem(row).question}] for row in range(options.prompts)]
    prompts: Any = tokenizer.apply_chat_template(
        questions, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    prompts.pop("token_type_ids", None)
    print(f"| hidden | mean surprise, nats | tokens it takes | steps of {' | steps of '.join(SHAPES)} |")
    print("|---|---|---|" + "---|" * len(SHAPES))
    with torch.inference_mode():
        for name, hidden in ((name, hidden) for name, hidden in HIDDEN.items() if options.only in name):
            pool = responses(model, prompts, tokenizer.eos_token_id, options.samples, hidden)
            totals = summed(pool)
            seen = [[first_firing(pool, size, seed) for seed in range(options.runs)] for size in SHAPES.values()]
            steps_in_words = " | ".join(
                ", ".join("-" if step is None else str(step) for step in steps) for steps in seen
            )
            mean = f"{totals.mean:.4f} +- {totals.error:.4f}"
            takes = tokens_needed(totals) if hidden else "-"
            print(f"| {name} | {mean} | {takes} | {steps_in_words} |", flush=True)


if __name__ == "__main__":
    main()
