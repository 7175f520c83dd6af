import json
import struct
from pathlib import Path

import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.provenance import checkpoint
from mismatch_probe.provenance.environment import content_key, sequence_seed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["TinyForCausalLM"], "max_position_embeddings": 64, "torch_dtype": "bfloat16"})
    )
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(24))
    return tmp_path


def test_a_checkpoint_is_described_from_its_files(folder: Path) -> None:
    config = checkpoint.read_config(folder)
    assert checkpoint.architecture(config) == "TinyForCausalLM"
    assert checkpoint.context_length(config) == 64
    assert checkpoint.checkpoint_dtype(config) == "bfloat16"
    assert checkpoint.num_parameters(folder) == 6


def test_one_changed_weight_changes_the_fingerprint(folder: Path) -> None:
    before = checkpoint.fingerprint(folder)
    assert before == checkpoint.fingerprint(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert checkpoint.fingerprint(folder) != before


def test_another_generation_config_changes_the_fingerprint(folder: Path) -> None:
    before = checkpoint.fingerprint(folder)
    (folder / "generation_config.json").write_text("{}")
    assert checkpoint.fingerprint(folder) != before


@pytest.mark.parametrize("cut", [0, 4, 20, 90])
def test_a_truncated_weight_file_is_named(folder: Path, cut: int) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:cut])
    with pytest.raises(UsageError, match="not an intact safetensors file"):
        checkpoint.fingerprint(folder)


def test_a_shard_that_the_index_lists_and_the_folder_lacks_is_named(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors", "v": "model-00002.safetensors"}}))
    with pytest.raises(UsageError, match=r"lacks model-00002\.safetensors, which its index lists"):
        checkpoint.weight_files(folder)


def test_weights_that_the_index_does_not_list_are_no_part_of_the_model(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert checkpoint.weight_files(folder) == [folder / "model.safetensors"]
    assert checkpoint.num_parameters(folder) == 6


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match="is no index of weights"):
        checkpoint.weight_files(folder)


def test_a_weight_file_whose_header_is_no_object_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(UsageError, match=r"not an intact safetensors file .*not an object"):
        checkpoint.fingerprint(folder)


def test_no_weights_and_no_config_are_two_sentences(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \.safetensors weights"):
        checkpoint.fingerprint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UsageError, match="the checkpoint is damaged"):
        checkpoint.read_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        checkpoint.read_config(folder)


def test_seeds_and_keys_depend_on_what_they_name_and_nothing_else() -> None:
    assert sequence_seed(0, "p", 1) == sequence_seed(0, "p", 1)
    assert len({sequence_seed(0, "p", 1), sequence_seed(1, "p", 1), sequence_seed(0, "q", 1)}) == 3
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    assert content_key({"a": 1}) != content_key({"a": 2})


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], {"a": "b"}])
def test_architectures_that_are_no_list_of_names_are_told(tmp_path: Path, names: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    with pytest.raises(UsageError, match=r"config\.json gives its architectures as .* a list of names, such as "):
        checkpoint.read_config(tmp_path)


@pytest.mark.parametrize("names", [None, [], ["LlamaForCausalLM"]])
def test_architectures_that_are_a_list_of_names_or_nothing_are_read(tmp_path: Path, names: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    assert checkpoint.read_config(tmp_path) == {"architectures": names}


GEMMA = {"model_type": "gemma3_text", "bos_token_id": 2}


@pytest.mark.parametrize(
    ("config", "tokenizer", "token"),
    [
        (GEMMA, {"bos_token": "<bos>"}, (2, "<bos>")),
        ({"model_type": "gemma3", "text_config": GEMMA}, {"bos_token": {"content": "<bos>"}}, (2, "<bos>")),
        (GEMMA, None, (2, "BOS")),
        ({"model_type": "llama", "bos_token_id": 1}, {"bos_token": "<s>", "add_bos_token": True}, (1, "<s>")),
        ({"model_type": "llama", "bos_token_id": 1}, {"bos_token": "<s>", "add_bos_token": False}, None),
        ({"model_type": "llama", "bos_token_id": 1}, {"add_bos_token": True, "chat_template": "{{ messages }}"}, None),
        ({"model_type": "qwen2", "bos_token_id": None}, {"add_bos_token": True}, None),
        ({"model_type": "llama", "bos_token_id": 1}, {"bos_token": "<|im_start|>"}, None),
    ],
)
def test_the_token_that_texts_begin_with_is_the_familys_or_the_tokenizers(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object] | None, token: tuple[int, str] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert checkpoint.start_token(tmp_path) == token
