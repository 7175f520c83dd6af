"""What scoring long responses costs beside one plain forward a response, and how much of it is the same kernels.

    python -m benchmarks.long_responses [--num-responses 12] [--repeats 3] > reports/long-responses.md

Processor time on one thread, which others on the machine disturb less than wall time; `compare_cost` measures that.
Matrix products and attention are PyTorch's own on both sides, and the reference has to compute in FP32 as the plain
script does. So no way of scoring takes less processor time than these kernels: that is the bound.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from mismatch_probe.config.model import ModelSettings, TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.host import prepare_process
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.tasks import resolve_model
from mismatch_probe.training_path.batching import plan_batches
from mismatch_probe.training_path.scorer import Scorer

PROMPT_TOKENS: Final = 40
MEAN_TOKENS: Final = 926
"""Of the demo model's responses to sums:long."""
SIDES: Final = ((Dtype.BF16, False), (Dtype.FP16, False), (Dtype.FP32, False), (Dtype.FP32, True))

EXPLAINED: Final = """
Products and attention are shares of scoring's time. They are the same PyTorch kernels on both sides, in the same
format: pi has to be the trainer's arithmetic, and the reference exact. The bound is how many times as fast a scoring
would be that did nothing else. The rest are norms, rotary positions and residuals as transformers writes them out.
Wall time is another matter: the plain script shares each operation among all threads, which wait for each other at
its end, where scoring gives each thread passes of its own (`benchmarks.compare_cost`).

Made by `python -m benchmarks.long_responses > reports/long-responses.md`.
""".strip()

aten = torch.ops.aten
KERNELS: Final = (aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)


class KernelSeconds(TorchDispatchMode):
    """Processor seconds of this thread in matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in KERNELS:
            return func(*args, **(kwargs or {}))
        begun = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds["attention" if func is KERNELS[-1] else "products"] += time.thread_time() - begun
        return result


@dataclass(frozen=True)
class Cost:
    """Seconds of the processor: all of them, and those in kernels."""

    processor: float
    kernels: dict[str, float]


def responses(count: int) -> list[TokenSequence]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(MEAN_TOKENS, 60, count), 1, 1000).astype(int)
    return [
        TokenSequence(
            str(row), random.integers(3, 300, PROMPT_TOKENS).tolist(), random.integers(3, 300, length).tolist()
        )
        for row, length in enumerate(lengths)
    ]


def plainly(model: Any, sequences: list[TokenSequence]) -> None:
    """As `benchmarks.compare_cost.plain_script` scores."""
    for sequence in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([sequence.prompt_token_ids + sequence.token_ids])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(sequence.prompt_token_ids) - 1 : -1]
        logprobs.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0].mean().item()


def scored(scorer: Scorer, sequences: list[TokenSequence]) -> None:
    for rows in plan_batches([sequence.num_tokens for sequence in sequences], TrainingPathSettings().batch_tokens):
        scorer.score_batch([sequences[row] for row in rows])


def costs(ways: list[Callable[[], None]], repeats: int) -> list[Cost]:
    """Of each way, its repeats in turn with the others'; the least of them, after one that warms up."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        for number, way in enumerate(ways):
            begun = time.process_time()
            way()
            seconds[number].append(time.process_time() - begun)
    measured = []
    for number, way in enumerate(ways):
        with KernelSeconds() as kernels:
            way()
        measured.append(Cost(min(seconds[number][1:]), kernels.seconds))
    return measured


def row(dtype: Dtype, reference: bool, sequences: list[TokenSequence], repeats: int) -> str:
    folder = resolve_model(ModelSettings(path="demo"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype.torch_name)).eval()
    with Scorer.load(folder, dtype, TrainingPathSettings(), reference=reference) as scorer:
        plain, ours = costs([lambda: plainly(model, sequences), lambda: scored(scorer, sequences)], repeats)
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    shares = " | ".join(f"{ours.kernels[name] / ours.processor:.0%}" for name in ("products", "attention"))
    return (
        f"| {'reference' if reference else 'pi'}, {dtype} | {tokens / plain.processor:,.0f} | "
        f"{tokens / ours.processor:,.0f} | {plain.processor / ours.processor:.2f} | {shares} | "
        f"{plain.processor / sum(ours.kernels.values()):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-responses", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    prepare_process()
    sequences = responses(arguments.num_responses)
    torch.set_num_threads(1)
    length = median(len(sequence.token_ids) for sequence in sequences)
    print(
        f"# Scoring long responses\n\n{len(sequences)} responses of about {length:.0f} tokens, the demo checkpoint; "
        "processor time on one thread. The plain script runs one\ntransformers forward a response and takes the "
        "log-probs alone; scoring gives entropy and most likely token as well.\n\n"
        "| | plain, tokens/s | scoring, tokens/s | times as fast | matrix products | attention | bound |\n"
        "|---|---|---|---|---|---|---|"
    )
    for dtype, reference in SIDES:
        print(row(dtype, reference, sequences, arguments.repeats), flush=True)
    print(f"\n{EXPLAINED}")


if __name__ == "__main__":
    main()
