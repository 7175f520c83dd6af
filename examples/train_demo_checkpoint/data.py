"""Training batches: problems of one length, templated as the probe templates them, loss on the response only."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from mismatch_probe.tasks.problems import TASKS, ProblemSet, TermRange

IGNORED = -100


@dataclass(frozen=True)
class LengthBand:
    """A range of term counts and the share of training steps (so, of tokens) spent on it."""

    terms: TermRange
    share: float


CURRICULUM = {
    "copy": (LengthBand(TermRange(2, 8), 0.06), LengthBand(TermRange(9, 75), 0.06)),
    "sums": (
        LengthBand(TermRange(2, 5), 0.46),
        LengthBand(TermRange(6, 20), 0.24),
        LengthBand(TermRange(21, 75), 0.18),
    ),
}


def batches(
    tokenizer: PreTrainedTokenizerFast, num_steps: int, tokens_per_step: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `num_steps` pairs (input ids [B, S], labels [B, S]); the first tenth of the steps are short ones only."""
    rng = random.Random(seed)
    bands = [(task, band) for task, bands_of_task in CURRICULUM.items() for band in bands_of_task]
    short_bands = [(task, band) for task, band in bands if band.terms.high <= 8]
    for step in range(num_steps):
        choices = short_bands if step < num_steps // 10 else bands
        [(task, band)] = rng.choices(choices, weights=[band.share for _, band in choices])
        num_terms = rng.randint(band.terms.low, band.terms.high)
        problems = ProblemSet(TASKS[task], TermRange(num_terms, num_terms), seed=rng.getrandbits(64))
        yield _batch(tokenizer, problems, tokens_per_step)


def _batch(
    tokenizer: PreTrainedTokenizerFast, problems: ProblemSet, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows: list[tuple[list[int], list[int]]] = []
    total = 0
    while total < num_tokens:
        problem = problems.problem(len(rows))
        prompt: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, return_dict=False
        )
        response = [*tokenizer.encode(problem.solution), tokenizer.eos_token_id]
        rows.append((prompt, response))
        total += len(prompt) + len(response)
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (prompt, response) in enumerate(rows):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    return ids, labels
