"""What a broken prefix costs: conversations of a real model under three templates, scored as a trainer joins turns.

    python -m benchmarks.turns CHECKPOINT SCRATCH --publish reports/turns.md

Each template makes conversations of its own: the model samples every turn from what the template rendered. Both sides
are FP32, so that what remains is the cost of the other context.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mismatch_probe.__main__ import run as run_command

CHATS = Path("examples/prompts/chats.jsonl")
FOLLOW_UPS = ("Say that in other words.",)
NUM_TOKENS = 24

Render = Callable[[Any, list[int], list[int], int], list[int]]
"""The history that the next prompt begins with, from tokenizer, prompt, completion and the number of the turn."""


def as_sampled(tokenizer: Any, prompt: list[int], completion: list[int], turn: int) -> list[int]:
    return [*prompt, *completion]


def tokenized_again(tokenizer: Any, prompt: list[int], completion: list[int], turn: int) -> list[int]:
    return [*prompt, *tokenizer(tokenizer.decode(completion), add_special_tokens=False)["input_ids"]]


def without_first_half(tokenizer: Any, prompt: list[int], completion: list[int], turn: int) -> list[int]:
    """As a template strips the thinking of earlier turns."""
    return [*prompt, *completion[len(completion) // 2 :]]


TEMPLATES: dict[str, Render] = {
    "as it was sampled": as_sampled,
    "its text tokenized again": tokenized_again,
    "without the first half of each answer": without_first_half,
}


def sampled(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """A completion of each prompt and its log-probs, up to the token that ends a turn."""
    length = max(map(len, prompts))
    pad = tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        made = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=NUM_TOKENS, output_logits=True, return_dict_in_generate=True, pad_token_id=pad,
        )  # fmt: skip
    log_probs = torch.log_softmax(torch.stack(made.logits, 1).float(), -1)
    of_ids = log_probs.gather(-1, made.sequences[:, length:, None])[..., 0]
    completions = []
    for row, values in zip(made.sequences[:, length:].tolist(), of_ids.tolist(), strict=True):
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completions.append((row[:end], values[:end]))
    return completions


def conversations(model: Any, tokenizer: Any, render: Render, num_prompts: int) -> Iterator[dict[str, Any]]:
    """The turns of all conversations as rows of the plain format."""
    questions = [json.loads(line)["prompt"] for line in CHATS.read_text().splitlines()[:num_prompts]]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}] if isinstance(question, str) else question,
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    ]
    for turn in range(len(FOLLOW_UPS) + 1):
        completions = sampled(model, tokenizer, prompts)
        for number, (prompt, (token_ids, log_probs)) in enumerate(zip(prompts, completions, strict=True)):
            yield {"prompt_token_ids": prompt, "token_ids": token_ids, "logprobs": log_probs, "trajectory": number}
        if turn < len(FOLLOW_UPS):
            text = f"\n<|im_start|>user\n{FOLLOW_UPS[turn]}<|im_end|>\n<|im_start|>assistant\n"
            follow_up = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts = [
                [*render(tokenizer, prompt, completion, turn), *follow_up]
                for prompt, (completion, _) in zip(prompts, completions, strict=True)
            ]


def run(*words: object) -> None:
    with redirect_stdout(StringIO()):
        run_command([str(word) for word in words])


def metrics_of(log: Path, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Of the logged sampler against the training path, both in FP32."""
    dtypes = ("--train-dtype", "fp32", "--infer-dtype", "fp32", "--temperature", "1")
    run("import", log, "--out", folder / "run", *dtypes)
    run("score", folder / "run", "--model", checkpoint, "--out", folder / "scored", "--no-engine")
    summary = json.loads((folder / "scored" / "summary.json").read_text())
    metrics: dict[str, Any] = summary["pairs"][0]["metrics"]
    return metrics


def row_of(name: str, log: Path, checkpoint: Path, folder: Path) -> str:
    """A row of the report: how many turns break, and the mismatch of the turns as sampled and as joined."""
    own = metrics_of(log, checkpoint, folder / "own")
    turns = json.loads((folder / "own" / "run" / "manifest.json").read_text())["log"]["turns"]
    share = turns["num_broken"] / turns["num_turns"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in turns["kinds"].items()) or "none"
    joined = {}
    if turns["num_joined"]:
        joined = metrics_of(folder / "own" / "run" / "joined", checkpoint, folder / "joined")
    cells = [name, f"{share:.0%}", kinds, str(turns["num_joined"])]
    for metric in ("abs_logprob_diff", "kl_k3", "ess_token"):
        for metrics in (own, joined):
            value = metrics.get(metric)
            cells.append("" if value is None else _write(value))
    return f"| {' | '.join(cells)} |"


def _write(estimate: dict[str, Any]) -> str:
    """A value with its interval; few responses have none."""
    if estimate["low"] is None or estimate["high"] is None:
        return f"{estimate['value']:.2g}"
    return f"{estimate['value']:.2g} [{estimate['low']:.2g}, {estimate['high']:.2g}]"


COLUMNS = (
    "history", "turns that break", "first breaks", "turns joined", "mean abs(d), own", "joined", "KL (k3), own",
    "joined", "ESS of tokens, own", "joined",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--publish", type=Path)
    flags = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(flags.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(flags.checkpoint, dtype=torch.float32).eval()
    rows = []
    for number, (name, render) in enumerate(TEMPLATES.items()):
        torch.manual_seed(0)
        folder = flags.scratch / str(number)
        folder.mkdir(parents=True)
        log = folder / "log.jsonl"
        log.write_text(
            "".join(json.dumps(row) + "\n" for row in conversations(model, tokenizer, render, flags.num_prompts))
        )
        rows.append(row_of(name, log, flags.checkpoint, folder))
        print(rows[-1], flush=True)
    if flags.publish is not None:
        lines = "|".join("---" for _ in COLUMNS)
        text = REPORT.format(
            columns=" | ".join(COLUMNS), lines=lines, rows="\n".join(rows), num_prompts=flags.num_prompts
        )
        flags.publish.write_text(text, encoding="utf-8")


REPORT = """# What a broken prefix costs

SmolLM2-135M-Instruct in {num_prompts} conversations of two turns, at most 24 tokens each, under three templates. The
model samples each turn from what the template rendered of the turns before; both sides are FP32, so that the mismatch
is the cost of another context. *Own*: each turn behind the prompt that it was sampled from. *Joined*: the turns behind
a break, behind all that was sampled and observed before, as a trainer has them that joins the turns (`RUN/joined`).
Intervals are of 95 %, clustered by conversation.

| {columns} |
|{lines}|
{rows}

Made by `python -m benchmarks.turns build/real/smollm2 SCRATCH --publish reports/turns.md`.
"""


if __name__ == "__main__":
    main()
