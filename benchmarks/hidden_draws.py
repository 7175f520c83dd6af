"""How soon the guard `draws` sees settings that an engine hides, and how often it is wrong, on a checkpoint's own
distribution.

    python -m benchmarks.hidden_draws MODEL [--text TEXT] [--steps 20000] > TABLE

The context is chosen by the policy as `train` does, in FP32; its distribution is then known, and tokens are drawn from
it as it is or under a hidden setting. The default guard judges each step through the code that `train` runs. The last
column is about how many tokens the best test needs, by the lemma of Neyman and Pearson, that is wrong as rarely as one
of 5 standard errors: their log-likelihood ratio is then 12.5 nats on average.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mismatch_probe.config.train import PolicySettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.guards.book import GuardBook
from mismatch_probe.guards.rules import DEFAULT_GUARDS
from mismatch_probe.records.sequences import EncodedPrompt
from mismatch_probe.stats.sequences import Floats
from mismatch_probe.train.distributed import join_process_group
from mismatch_probe.train.policy import Policy
from mismatch_probe.train.weight_sync import NUM_DRAWS, widest_context

TEXT: Final = "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n"
TEMPERATURES: Final = (0.7, 0.8, 0.9, 1.1, 1.3)
TOP_P: Final = (0.9, 0.95)
RUNS: Final = 200
LONGEST: Final = 60
_EXPONENT: Final = 12.5
"""Nats: half the square of 5 standard errors."""


def hidden_settings(log_pi: Floats) -> Iterator[tuple[str, Floats]]:
    """What tokens are drawn from [V], by its name."""
    for temperature in TEMPERATURES:
        yield f"temperature {temperature}", softmax(log_pi / temperature)
    for top_p in TOP_P:
        order = np.argsort(-log_pi)
        pi = np.exp(log_pi[order])
        drawn = np.zeros_like(pi)
        drawn[order] = np.where(pi.cumsum() - pi < top_p, pi, 0.0)
        yield f"top-p {top_p}", drawn / drawn.sum()


def softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max())
    shares: Floats = weights / weights.sum()
    return shares


def fired_steps(surprise: Floats, error: float, drawn: Floats, steps: int, seed: int) -> list[int]:
    """The steps at which the guard fires, of so many."""
    book = GuardBook(tuple(guard for guard in DEFAULT_GUARDS if guard.name == "draws"))
    random, cumulated = np.random.default_rng(seed), drawn.cumsum()
    fired = []
    for step in range(1, steps + 1):
        tokens = np.searchsorted(cumulated, random.random(NUM_DRAWS) * cumulated[-1], side="right")
        metrics = {"sync/draw_surprise_mean": float(surprise[tokens].mean()), "sync/draw_surprise_error": error}
        if book.evaluate(step, metrics).events:
            fired.append(step)
    return fired


def log_pi_of(folder: str, text: str) -> Floats:
    """Of the context that `train` would draw behind, with this prompt [V]."""
    join_process_group(torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = Policy(Path(folder), Dtype.FP32, PolicySettings(), temperature=1.0)
    context = widest_context(policy, [EncodedPrompt("text", tokenizer(text).input_ids, text)]).token_ids
    print(f"Context: {tokenizer.decode(context)!r}\n")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1].double()
    log_pi: Floats = torch.log_softmax(logits, -1).numpy()
    return log_pi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", default=TEXT, help="the prompt")
    parser.add_argument("--steps", type=int, default=20000, help="clean ones")
    options = parser.parse_args()
    log_pi = log_pi_of(options.model, options.text)
    pi = np.exp(log_pi)
    surprise = log_pi - pi @ log_pi
    error = float(np.sqrt(pi @ surprise**2 / NUM_DRAWS))
    print(f"Entropy {-(pi @ log_pi):.2f} nats, variance of log pi {pi @ surprise**2:.2f}, {NUM_DRAWS} tokens a step.\n")
    print("| hidden | mean surprise, nats | steps until it fires: median, nine tenths | fewest tokens of any test |")
    print("|---|---|---|---|")
    wrong = len(fired_steps(surprise, error, pi, options.steps, 0))
    print(f"| none | 0 | {wrong} firings in {options.steps:,} steps | |")
    for name, drawn in hidden_settings(log_pi):
        first = [(fired_steps(surprise, error, drawn, LONGEST, seed) or [LONGEST + 1])[0] for seed in range(RUNS)]
        median, most = (
            f"{step:.0f}" if step <= LONGEST else f"over {LONGEST}" for step in np.quantile(first, (0.5, 0.9))
        )
        nats = float(drawn[drawn > 0] @ np.log(drawn[drawn > 0] / pi[drawn > 0]))
        print(f"| {name} | {drawn @ surprise:.2f} | {median}, {most} | {_EXPONENT / nats:.0f} |", flush=True)


if __name__ == "__main__":
    main()
