"""What the logs are drawn from: responses that models sampled, and checkpoints that differ from the demo checkpoint.

Two pools are comparisons by `mismatch-probe compare`, whose engine is vLLM, where SCRATCH has them; the others are
sampled by transformers with a key-value cache in BF16 and scored in one pass.
"""

import json
import pickle
import random as draws
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.planted_logs.base import Log, Response
from mismatch_probe import demo_checkpoint
from tests.tiny_models import make_checkpoint

DEMO = Path(demo_checkpoint.__file__).parent
CHATS = Path("examples/prompts/chats.jsonl")
LAYERS, EXPERTS, TAKEN = 4, 16, 4
"""Of the small mixture of experts, whose first layer is dense."""


class WideProducts:
    """`linear` of a layer of BF16 matrices: products are summed in FP32 and rounded once, as where a processor has
    such an instruction. PyTorch's own take six times as long on one that has none.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        self.layer = layer
        self.source = self.wide = torch.empty(0)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight.data
        if weight.data_ptr() != self.source.data_ptr():  # a lab gives a layer new weights, and never writes into one
            self.source, self.wide = weight, weight.float()
        bias = None if self.layer.bias is None else self.layer.bias.float()
        return torch.nn.functional.linear(states.float(), self.wide, bias).to(states.dtype)


def loaded(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = WideProducts(layer)  # type: ignore[method-assign, assignment]
    return model


def prompts_of_sums(count: int, terms: int, seed: int) -> list[list[int]]:
    draws.seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    texts = [" ".join(f"{n + 1}:{draws.randint(10, 99)}" for n in range(terms)) for _ in range(count)]
    chats = [[{"role": "user", "content": f"sum {text}"}] for text in texts]
    return [
        tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        for chat in chats
    ]


@torch.inference_mode()
def sampled(
    model: Any, prompts: Sequence[list[int]], tokens: int, *, temperature: float = 1.0, top_p: float = 1.0,
    end: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Ids, log-probs (of what was drawn from; raw ones of greedy tokens) and kept sets of one response a prompt.

    All prompts of a length are one batch, decoded with a key-value cache; temperature 0 is greedy.
    """
    made: list[dict[str, Any]] = []
    for length in sorted({len(prompt) for prompt in prompts}):
        batch = torch.tensor([prompt for prompt in prompts if len(prompt) == length])
        rows: list[dict[str, Any]] = [{"prompt": prompt, "ids": [], "mu": [], "kept": []} for prompt in batch.tolist()]
        ended, past, ids = np.zeros(len(batch), bool), None, batch
        for _ in range(tokens):
            answer = model(ids, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            log_probs = torch.log_softmax(answer.logits[:, -1].float() / (temperature or 1.0), -1)
            kept = nucleus(log_probs, top_p)
            log_probs = torch.log_softmax(log_probs.masked_fill(~kept, -torch.inf), -1)
            best = log_probs.argmax(-1, keepdim=True)
            ids = torch.multinomial(log_probs.exp(), 1) if temperature else best
            for row, token, place in zip(rows, ids[:, 0].tolist(), range(len(rows)), strict=True):
                if not ended[place]:
                    row["ids"].append(token)
                    row["mu"].append(float(log_probs[place, token]))
                    if top_p < 1:
                        row["kept"].append(kept[place].nonzero()[:, 0].tolist())
            ended |= ids[:, 0].numpy() == (-1 if end is None else end)
            if ended.all():
                break
        made.extend(rows)
    return made


def nucleus(log_probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which of [B, V] are kept: the likeliest tokens up to a share of `top_p`, and the one that reaches it."""
    if top_p >= 1:
        return torch.ones_like(log_probs, dtype=torch.bool)
    ordered, places = log_probs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before < top_p)


@torch.inference_mode()
def scored(model: Any, prompt: list[int], ids: list[int], kept: list[list[int]] | None = None) -> np.ndarray:
    """Log-probs of the response in one pass, renormalised over the kept sets where these are given."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
    if kept is not None:
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        for place, tokens in enumerate(kept):
            allowed[place, [*tokens, ids[place]]] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy().astype(float)


def responses(model: Any, rows: list[dict[str, Any]], *, cut: bool = False) -> Log:
    return [
        Response(
            row["prompt"], row["ids"], np.array(row["mu"]),
            scored(model, row["prompt"], row["ids"], row["kept"] if cut else None),
            extra={"kept_token_ids": row["kept"]} if cut else {},
        )
        for row in rows
    ]  # fmt: skip


def mixture(folder: Path) -> Log:
    """A random mixture of experts in `folder`, and its responses with the experts that its routers took."""
    if not folder.exists():
        make_checkpoint(
            folder, "qwen3-moe", num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TAKEN,
            mlp_only_layers=[0],
        )  # fmt: skip
    model = loaded(folder)
    prompts = [np.random.default_rng(n).integers(0, 250, 12).tolist() for n in range(36) for _ in range(2)]
    log = responses(model, sampled(model, prompts, 120))
    return [response.with_extra(routed_experts=experts_of(model, response)) for response in log]


@torch.inference_mode()
def experts_of(model: Any, response: Response) -> list[list[list[int]]]:
    """Of each token but the last, of each layer: the experts; 0 throughout in the dense first layer."""
    answer = model(torch.tensor([response.prompt + response.ids]), output_router_logits=True)
    taken = [logits.topk(TAKEN, -1).indices for logits in answer.router_logits]
    dense = [torch.zeros_like(taken[0])] * (LAYERS - len(taken))
    return torch.stack([*dense, *taken], 1)[:-1].tolist()


def other_weights(folder: Path, size: float, seed: int) -> Path:
    """The demo checkpoint, each matrix moved by noise of this share of its own size."""
    if folder.exists():
        return folder
    copytree(DEMO, folder, ignore=lambda _, names: [name for name in names if name.endswith((".py", "__pycache__"))])
    torch.manual_seed(seed)
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    moved = {
        name: (w.float() + size * w.float().std() * torch.randn(w.shape)).to(w.dtype) if w.ndim > 1 else w
        for name, w in weights.items()
    }
    save_file(moved, file, metadata={"format": "pt"})
    return folder


def sampled_by_vllm(run: Path, checkpoint: Path) -> Log:
    """Six responses a prompt of a comparison, whose sampling is enough: pi is computed here, in BF16."""
    model, count, made = loaded(checkpoint), Counter[str](), []
    ended = list(run.glob("parts/sample-bf16/*-rollouts.parquet"))
    rollouts, leg = (
        (ended[0], next(run.glob("parts/sample-bf16/*decode.parquet")))
        if ended else (run / "rollouts.parquet", run / "legs" / "infer-bf16-decode.parquet")
    )  # fmt: skip
    mu = {row["id"]: row["logprobs"] for row in parquet.read_table(leg).to_pylist()}
    for row in parquet.read_table(rollouts).to_pylist():
        count[row["prompt_id"]] += 1
        if count[row["prompt_id"]] <= 6:
            prompt, ids = row["prompt_token_ids"], row["token_ids"]
            made.append(Response(prompt, ids, np.array(mu[row["id"]]), scored(model, prompt, ids)))
    return made


def sampled_here(checkpoint: Path) -> Log:
    """Four responses a prompt, of sums by the demo checkpoint and of the shipped chats by another one."""
    torch.manual_seed(5)
    model: Any = loaded(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    if checkpoint == DEMO:
        prompts, tokens = prompts_of_sums(24, 8, 3), 160
    else:
        texts = [json.loads(line)["prompt"] for line in CHATS.read_text(encoding="utf-8").splitlines()[:20]]
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = [
            tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            for chat in chats
        ]
        tokens = 96
    each = [prompt for prompt in prompts for _ in range(4)]
    return responses(model, sampled(model, each, tokens, end=tokenizer.eos_token_id))


def pool_of(run: Path, checkpoint: Path) -> Log:
    """Responses that vLLM sampled, where there is such a comparison; else those of transformers."""
    return sampled_by_vllm(run, checkpoint) if run.exists() else sampled_here(checkpoint)


def all_pools(scratch: Path, smollm2: Path) -> dict[str, Log]:
    """Made once, then kept in `scratch`."""
    file = scratch / "pools.pickle"
    if file.exists():
        with file.open("rb") as stream:
            kept: dict[str, Log] = pickle.load(stream)
        return kept
    torch.manual_seed(0)
    demo = loaded(DEMO)
    end = demo.config.eos_token_id
    sums = prompts_of_sums(24, 5, 1)
    pools = {"demo": pool_of(scratch / "demo", DEMO), "smollm2": pool_of(scratch / "smollm2", smollm2)}
    odd = [np.random.default_rng(n).integers(15, 300, 24).tolist() for n in range(24)]  # so that it is less sure
    pools["nucleus"] = responses(demo, sampled(demo, (sums[:8] + odd) * 3, 80, top_p=0.9, end=end), cut=True)
    longer = [np.random.default_rng(n).integers(15, 300, 40 + n % 3).tolist() for n in range(20)]
    pools["short"] = responses(demo, sampled(demo, longer * 3, 100))
    pools["greedy"] = responses(demo, sampled(demo, sums, 80, temperature=0.0, end=end))
    pools["mixture"] = mixture(scratch / "moe")
    with file.open("wb") as stream:
        pickle.dump(pools, stream)
    return pools
