"""Train the demo checkpoint from scratch on the CPU: `python examples/train_demo_checkpoint/train.py --out DIR`.

Seeded; FP32 parameters under BF16 autocast, AdamW, cosine schedule. It stops early on purpose: reinforcement learning
must have something to learn. The saved weights are rounded to BF16, as those of published checkpoints are.
"""

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from data import batches
from tokenizer import build_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.optimization import get_cosine_schedule_with_warmup

CONTEXT_LENGTH = 2048


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // 64) * 64,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT_LENGTH,
            tie_word_embeddings=True,
            initializer_range=0.04,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 20, options.steps)
    started = time.monotonic()
    schedule_batches = batches(tokenizer, options.steps, options.batch_tokens, options.seed)
    for step, (ids, labels) in enumerate(islice(schedule_batches, options.stop_after)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            seconds = time.monotonic() - started
            print(f"step {step} shape {tuple(ids.shape)} loss {loss.item():.4f} {seconds:.0f} s", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2400, help="steps of the full schedule")
    parser.add_argument("--stop-after", type=int, default=1800, help="steps taken of it")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer(CONTEXT_LENGTH)
    model = build_model(tokenizer)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, options)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
