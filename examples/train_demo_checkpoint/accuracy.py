"""Sampled accuracy on built-in tasks: `python examples/train_demo_checkpoint/accuracy.py demo sums:medium`.

Transformers in FP32 on the checkpoint's own weights, temperature 1, one response a prompt. A response that does not
end by itself counts as wrong.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from mismatch_probe.config.model import ModelSettings, PromptSettings
from mismatch_probe.tasks import encode_prompts, load_prompts, load_tokenizer, resolve_model, verify


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]]) -> list[list[int]]:
    """One response a prompt, as ids without padding; the end of the turn is the last id where it was reached."""
    pad = tokenizer.pad_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=ids != pad, max_length=model.config.max_position_embeddings)
    return [row[row != pad].tolist() for row in output[:, width:]]


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, num_prompts: int) -> str:
    prompts = load_prompts(PromptSettings(source=source, num_prompts=num_prompts))
    encoded = encode_prompts(prompts, tokenizer, "auto")
    responses = sample(model, tokenizer, [prompt.token_ids for prompt in encoded])
    ended = [response[-1] == tokenizer.eos_token_id for response in responses]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [
        end and verify(prompt.task or "", prompt.answer or "", text)
        for prompt, text, end in zip(prompts, texts, ended, strict=True)
    ]
    lengths = sorted(map(len, responses))
    return (
        f"{source}: correct {sum(right) / len(right):.1%}, ended {sum(ended) / len(ended):.1%}, n = {len(right)}, "
        f"response tokens {lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint's folder, a hub id, or demo")
    parser.add_argument("sources", nargs="+", help="built-in tasks, such as sums:medium")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = resolve_model(ModelSettings(path=options.model))
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for source in options.sources:
        torch.manual_seed(options.seed)
        print(describe(model, tokenizer, source, options.num_prompts), flush=True)


if __name__ == "__main__":
    main()
