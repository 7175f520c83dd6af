"""LoRA adapters as peft saves them, made for tiny checkpoints: seeded, and large enough to be seen."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def make_adapter(
    folder: Path, checkpoint: Path, *, alpha: int = 16, rank: int = 4, seed: int = 0, std: float = 0.1
) -> Path:
    """Write an adapter of every attention and MLP projection of `checkpoint` into `folder`."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=std, generator=generator)
    adapted.save_pretrained(folder)
    return folder
