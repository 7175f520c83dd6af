"""Tiny random checkpoints of real architectures, made with transformers: seeded, BF16-exact, loadable by engines.

Head size 32, which vLLM's CPU attention accepts; a tokenizer of one token a byte.
"""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BambaConfig,
    CLIPVisionConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mismatch_probe.training_path.loading import maker_of

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
IMAGE: Final = "<image>"
_SEEING_TEMPLATE: Final = """\
{%- for turn in messages -%}
{%- if turn.content is string -%}{{ turn.content }}
{%- else -%}
{%- for part in turn.content -%}
{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}>"""
"""A turn is its text, with the marker in the place of each image; what is behind is the start of an answer."""
VOCAB_SIZE: Final = 320
SLIDING_WINDOW: Final = 16

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_NO_HEAD_DIM: Final = {key: value for key, value in _SHAPE.items() if key != "head_dim"}

FAMILIES: Final[dict[str, Callable[..., PreTrainedConfig]]] = {
    "llama": lambda **changes: LlamaConfig(**{**_SHAPE, **changes}),
    "qwen2": lambda **changes: Qwen2Config(**{**_NO_HEAD_DIM, **changes}),
    "qwen3": lambda **changes: Qwen3Config(**{**_SHAPE, "tie_word_embeddings": True, **changes}),
    "mistral-sliding": lambda **changes: MistralConfig(**{**_SHAPE, "sliding_window": SLIDING_WINDOW, **changes}),
    "qwen3-moe": lambda **changes: Qwen3MoeConfig(
        **{**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, **changes}
    ),
    "gemma2": lambda **changes: Gemma2Config(
        **{
            **_SHAPE,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 5.0,
            **changes,
        }
    ),
    "gemma3": lambda **changes: Gemma3TextConfig(
        **{
            **_SHAPE,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", *["full_attention"] * (changes.get("num_hidden_layers", 2) - 1)],
            **changes,
        }
    ),
}

_LINEAR: Final[dict[str, Any]] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: Final[dict[str, Any]] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}

HYBRIDS: Final[dict[str, Callable[..., PreTrainedConfig]]] = {
    "qwen3.5": lambda **changes: Qwen3_5TextConfig(**{**_SHAPE, **_LINEAR, **changes}),
    "qwen3-next": lambda **changes: Qwen3NextConfig(
        **{
            **_SHAPE,
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            **changes,
        }
    ),
    "falcon-h1": lambda **changes: FalconH1Config(**{**_SHAPE, **_MAMBA, "mamba_d_ssm": 128, **changes}),
    "bamba": lambda **changes: BambaConfig(**{**_NO_HEAD_DIM, **_MAMBA, "attn_layer_indices": [1], **changes}),
}
"""Families with recurrent layers."""

_EYE: Final[dict[str, Any]] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}

WITH_EYES: Final[dict[str, Callable[..., PreTrainedConfig]]] = {
    "qwen2.5-vl": lambda **changes: Qwen2_5_VLConfig(
        text_config={
            **_NO_HEAD_DIM,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            **changes,
        },
        vision_config={**_EYE, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        image_token_id=300,
        video_token_id=301,
        vision_start_token_id=302,
        vision_end_token_id=303,
        tie_word_embeddings=False,
    ),
    "gemma3-vl": lambda **changes: Gemma3Config(
        text_config=FAMILIES["gemma3"](**changes).to_dict(),
        vision_config={**_EYE, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56},
        mm_tokens_per_image=4,
        image_token_index=300,
        boi_token_index=301,
        eoi_token_index=302,
    ),
}
"""Families that see too."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer of one token a byte, then pad, bos and eos as ids 256, 257 and 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PAD, BOS, EOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def make_checkpoint(
    folder: Path | str, family: str = "llama", *, seed: int = 0, init_std: float = 0.2, **config_changes: Any
) -> Path:
    """Write a random model of `family` (FAMILIES, HYBRIDS, WITH_EYES) with its tokenizer into `folder`, in safetensors.

    Weights are stored in FP32 with values exact in BF16, as published checkpoints have. `init_std` is wide enough that
    the next-token distribution is far from uniform; `config_changes` override fields of the transformers config.
    """
    key = repr((family, seed, init_std, sorted(config_changes.items())))
    if key not in _made:
        _made[key] = Path(_home.name) / str(len(_made))
        _write(_made[key], (FAMILIES | HYBRIDS | WITH_EYES)[family](initializer_range=init_std, **config_changes), seed)
    return copytree(_made[key], Path(folder), dirs_exist_ok=True)


def make_seeing_checkpoint(folder: Path) -> Path:
    """Write a random LLaVA of FP32 weights exact in BF16 whose processor, tokenizer and template take images: an image
    of 28 x 28 pixels is four tokens. Weights have the names of published checkpoints.
    """
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [IMAGE]})
    tokenizer.chat_template = _SEEING_TEMPLATE
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    eye = CLIPVisionConfig(**_EYE, num_hidden_layers=2, num_attention_heads=2, image_size=28, initializer_range=0.2)
    text = FAMILIES["llama"](initializer_range=0.2)
    config = LlavaConfig(
        text_config=text.to_dict(),
        vision_config=eye.to_dict(),
        image_token_index=image_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    _write(folder, config, seed=0)
    path = folder / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    sizes: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    LlavaProcessor(
        CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def quantise_blocks(folder: Path, block: int = 128) -> Path:
    """Store a checkpoint's projections in FP8 by blocks, with scales and a config that says so, as engines load it."""
    weights, stored = load_file(folder / "model.safetensors"), {}
    for name, weight in weights.items():
        if "proj" not in name:
            stored[name] = weight.to(torch.bfloat16)
            continue
        rows, columns = (size // block for size in weight.shape)
        blocks = weight.reshape(rows, block, columns, block)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        stored[name] = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16", "quantization_config": quantization})
    )
    return folder


def plant_outliers(folder: Path, sink: int) -> Path:
    """Give a llama checkpoint what pretrained ones have: a massive activation behind the token `sink`, to which most
    attention goes where it stands first, and a huge and a dead channel in the residual stream.
    """
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, 5] = 0
    embeddings[:, 7] = 30 * embeddings[:, 7].abs() + 2
    embeddings[sink, 3] = 2000
    head_dim = _SHAPE["head_dim"]
    slowest = head_dim // 2 - 1
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weight[slowest::head_dim, 7] = 2.0
        if name.endswith("k_proj.weight"):
            weight[slowest::head_dim, 3] = 2.0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[5] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_home: Final = TemporaryDirectory(prefix="tiny-models-")
_made: Final[dict[str, Path]] = {}
"""Checkpoints of this process by how they were asked for: each is computed once, then copied."""


def _write(folder: Path, config: PreTrainedConfig, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker_of(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model.save_pretrained(folder, safe_serialization=True)
    byte_tokenizer().save_pretrained(folder)
