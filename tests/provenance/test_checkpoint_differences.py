"""What two checkpoints differ in: each planted difference is named, and files that say the same accuse nobody."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.provenance.checkpoint_differences import checkpoint_difference, weights_difference
from mismatch_probe.records.manifest import CheckpointDifference

Tensors = dict[str, npt.NDArray[np.float32]]

CONFIG: Final = {
    "architectures": ["TinyForCausalLM"],
    "bos_token_id": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    "transformers_version": "5.0.0",
}
TOKENIZER: Final = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 2, "content": "<s>"}],
    "normalizer": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]},
}
TEMPLATE: Final = "{% for message in messages %}You are helpful. {{ message }}{% endfor %}"


def tensors() -> Tensors:
    draw = np.random.default_rng(0)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")
    return {name: draw.standard_normal((8, 6)).astype(np.float32) for name in names}


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """To BF16, half to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def save(folder: Path, weights: Tensors, stored: str = "F32", name: str = "model.safetensors") -> None:
    """In the format FP32, or BF16 cut to its 16 bits."""
    header: dict[str, Any] = {}
    data = b""
    for tensor, values in weights.items():
        kept = values.tobytes() if stored == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        offsets = [len(data), len(data) + len(kept)]
        header[tensor] = {"dtype": stored, "shape": list(values.shape), "data_offsets": offsets}
        data += kept
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture
def train(tmp_path: Path) -> Path:
    folder = tmp_path / "train"
    folder.mkdir()
    save(folder, tensors())
    write(folder / "config.json", CONFIG)
    write(folder / "generation_config.json", {"temperature": 1.0})
    write(folder / "tokenizer.json", TOKENIZER)
    write(folder / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def infer(train: Path) -> Path:
    return copytree(train, train.parent / "infer")


def between(train: Path, infer: Path) -> CheckpointDifference:
    return checkpoint_difference(("train", train), ("infer", infer))


NOTHING: Final = ({}, {}, [], "")


def described(found: CheckpointDifference) -> tuple[object, ...]:
    """All but the weights."""
    return found.config, found.generation, found.tokenizer, found.chat_template


def test_a_copy_differs_in_nothing(train: Path, infer: Path) -> None:
    found = between(train, infer)
    assert described(found) == NOTHING
    assert not found.weights.are_other
    assert (found.weights.num_tensors, found.weights.num_rounded) == (3, 0)


def test_other_settings_are_named_with_both_values_while_weights_are_equal(train: Path, infer: Path) -> None:
    changed = {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "bos_token_id": 0}
    write(infer / "config.json", {**CONFIG, **changed})
    found = between(train, infer)
    assert found.config == {
        "rms_norm_eps": (1e-6, 1e-3),
        "rope_parameters.rope_theta": (1e5, 1e4),
        "bos_token_id": (1, 0),
    }
    assert not found.weights.are_other


def test_the_order_of_keys_and_their_layout_are_no_difference(train: Path, infer: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        content = json.loads((train / name).read_text())
        (infer / name).write_text(json.dumps(dict(reversed(content.items())), indent=8, ensure_ascii=False) + "\n\n")
    (infer / "chat_template.jinja").write_text(TEMPLATE + "\n")
    assert described(between(train, infer)) == NOTHING


def noise(weights: Tensors) -> None:
    values = weights["model.norm.weight"]
    error = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
    weights["model.norm.weight"] = values + 0.05 * np.sqrt(np.mean(values**2)) * error / np.sqrt(np.mean(error**2))


def test_the_tensor_that_differs_is_named_and_by_how_much(train: Path, infer: Path) -> None:
    weights = tensors()
    noise(weights)
    save(infer, weights)
    found = between(train, infer)
    assert (found.weights.num_other, found.weights.num_tensors) == (1, 3)
    assert found.weights.largest[0].name == "model.norm.weight"
    assert found.weights.largest[0].relative == pytest.approx(0.05, rel=1e-5)
    assert described(found) == NOTHING


def test_the_tensors_that_differ_most_come_first(train: Path, infer: Path) -> None:
    weights = {name: values * (1 + number / 100) for number, (name, values) in enumerate(tensors().items(), 1)}
    save(infer, weights)
    largest = between(train, infer).weights.largest
    assert [tensor.name for tensor in largest] == list(reversed(weights))
    assert [tensor.relative for tensor in largest] == pytest.approx([0.03, 0.02, 0.01], rel=1e-4)


def test_weights_in_another_format_are_equal_up_to_its_rounding(train: Path, infer: Path) -> None:
    save(infer, {name: rounded(values) for name, values in tensors().items()}, stored="BF16")
    weights = between(train, infer).weights
    assert not weights.are_other
    assert (weights.num_rounded, weights.formats) == (3, ("fp32", "bf16"))


def test_weights_in_another_format_that_are_also_other_ones_are_told(train: Path, infer: Path) -> None:
    other = tensors()
    noise(other)
    save(infer, {name: rounded(values) for name, values in other.items()}, stored="BF16")
    weights = between(train, infer).weights
    assert [tensor.name for tensor in weights.largest] == ["model.norm.weight"]
    assert (weights.num_other, weights.num_rounded) == (1, 2)


def test_a_tensor_in_one_alone_is_named(train: Path, infer: Path) -> None:
    save(infer, {**tensors(), "lm_head.weight": np.ones((8, 6), np.float32)})
    weights = between(train, infer).weights
    assert (weights.train_alone, weights.infer_alone, weights.alone) == (0, 1, ["lm_head.weight"])
    assert weights.are_other


def test_a_head_that_is_stored_beside_the_embeddings_it_is_equal_to_is_no_difference(train: Path, infer: Path) -> None:
    weights = tensors()
    save(infer, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    assert not between(train, infer).weights.are_other


def test_another_shape_is_told_without_a_number(train: Path, infer: Path) -> None:
    save(infer, {**tensors(), "model.norm.weight": np.ones((4,), np.float32)})
    [tensor] = between(train, infer).weights.largest
    assert (tensor.name, tensor.relative) == ("model.norm.weight", None)


def test_the_files_that_weights_are_spread_over_are_no_difference(train: Path, infer: Path) -> None:
    parts = [dict([item]) for item in tensors().items()]
    names = [f"model-{number}.safetensors" for number in range(len(parts))]
    (infer / "model.safetensors").unlink()
    for name, part in zip(names, parts, strict=True):
        save(infer, part, name=name)
    index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    write(infer / "model.safetensors.index.json", {"weight_map": index})
    assert not between(train, infer).weights.are_other


def test_of_checkpoints_too_large_to_be_read_whole_a_part_of_each_tensor_is(train: Path, infer: Path) -> None:
    ours = {
        "large": np.random.default_rng(0).standard_normal(2**17).astype(np.float32),
        "small": np.ones(8, np.float32),
    }
    theirs = {"large": ours["large"] * np.float32(1.25), "small": ours["small"] * 2}
    save(train, ours)
    save(infer, theirs)
    found = weights_difference(train, infer, whole_bytes=2**16)
    assert found.is_sampled
    assert {tensor.name: tensor.relative for tensor in found.largest} == pytest.approx({"small": 1.0, "large": 0.25})


def edited(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(TOKENIZER))
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["model"]["vocab"].update(a=1, b=0), ["tokenizer.json: vocab (2 tokens)"]),
        (lambda content: content["model"]["vocab"].update(c=7), ["tokenizer.json: vocab (1 token)"]),
        (lambda content: content["model"].update(merges=[]), ["tokenizer.json: merges"]),
        (lambda content: content.update(normalizer={"type": "NFC"}), ["tokenizer.json: normalizer"]),
        (lambda content: content["model"].update(merges=["a b"]), []),
        (lambda content: content.update(truncation={"max_length": 5}, padding={"length": 9}), []),
    ],
)
def test_the_part_of_a_tokenizer_that_differs_is_named(
    train: Path, infer: Path, change: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    write(infer / "tokenizer.json", edited(change))
    assert between(train, infer).tokenizer == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bos_token": "<bos>", "add_bos_token": True}, ["bos_token is <s> and <bos>"]),
        ({"bos_token": "<s>", "add_bos_token": False}, ["add_bos_token is True and False"]),
        ({}, ["bos_token is <s> and not set"]),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "model_max_length": 9, "tokenizer_class": "T"}, []),
    ],
)
def test_tokens_and_switches_of_a_tokenizer_are_compared_by_what_they_say(
    train: Path, infer: Path, settings: dict[str, Any], words: list[str]
) -> None:
    write(infer / "tokenizer_config.json", settings)
    assert between(train, infer).tokenizer == words


def test_it_is_told_where_two_templates_part(train: Path, infer: Path) -> None:
    (infer / "chat_template.jinja").write_text(TEMPLATE.replace("helpful", "careful\x1b[2J"))
    assert between(train, infer).chat_template == (
        "from character 38 on: `helpful. {{ message }}{%…` and `careful<U+001B>[2J. {{ message …`"
    )
    (infer / "chat_template.jinja").unlink()
    assert between(train, infer).chat_template == "only the training path's has one"


def test_a_template_in_the_tokenizers_settings_is_the_one_in_a_file(train: Path, infer: Path) -> None:
    (infer / "chat_template.jinja").unlink()
    write(infer / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True, "chat_template": TEMPLATE})
    assert described(between(train, infer)) == NOTHING


def test_a_damaged_tokenizer_is_refused_by_name(train: Path, infer: Path) -> None:
    (infer / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        between(train, infer)
