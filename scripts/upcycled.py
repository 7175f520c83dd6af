"""A mixture of experts from a dense Qwen3 checkpoint: `python -m scripts.upcycled SOURCE FOLDER`.

Sparse upcycling (arXiv 2212.05055): every expert is a copy of the layer's MLP, here with noise so that the choice of
experts matters, and the router is random. The weights of the chosen experts add up to 1, so without the noise the
mixture would compute what the dense model does.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_EXPERTS = 8
CHOSEN = 2
NOISE = 0.1
"""Standard deviation of what is added to an expert's weight, over that of the dense weight."""
ROUTER_DEVIATION = 0.2
SEED = 0


def upcycle(source: Path, folder: Path) -> None:
    """Write the mixture with the source's tokenizer into `folder`, in the source's dtype."""
    torch.manual_seed(SEED)
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = Qwen3Config.from_pretrained(source)
    shape = {name: value for name, value in config.to_dict().items() if name not in ("architectures", "model_type")}
    mixture_config = Qwen3MoeConfig(
        **shape,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    mixture = Qwen3MoeForCausalLM(mixture_config)
    weights = dense.state_dict()
    shared = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    mixture.load_state_dict(shared, strict=False)
    for layer, dense_layer in zip(mixture.model.layers, dense.model.layers, strict=True):
        _fill_experts(layer.mlp, dense_layer.mlp)
    mixture.tie_weights()
    mixture.to(config.dtype).save_pretrained(folder)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "__init__.py") and path.is_file():
            shutil.copy(path, folder / path.name)


def _fill_experts(sparse: torch.nn.Module, dense: torch.nn.Module) -> None:
    """gate_up_proj: (experts, 2 * width, hidden); down_proj: (experts, hidden, width)."""
    gate_up = torch.cat([dense.gate_proj.weight, dense.up_proj.weight])
    with torch.no_grad():
        for expert in range(NUM_EXPERTS):
            sparse.experts.gate_up_proj[expert] = _noisy(gate_up)
            sparse.experts.down_proj[expert] = _noisy(dense.down_proj.weight)
        torch.nn.init.normal_(sparse.gate.weight, std=ROUTER_DEVIATION)


def _noisy(weight: torch.Tensor) -> torch.Tensor:
    return weight + NOISE * weight.std() * torch.randn_like(weight)


if __name__ == "__main__":
    upcycle(Path(sys.argv[1]), Path(sys.argv[2]))
