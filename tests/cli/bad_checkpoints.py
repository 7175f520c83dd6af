"""Rows of bad input: checkpoints whose files are damaged, or do not fit each other."""

import json
import struct
from typing import Any

from tests.cli.bad_rows import Bad, Change, as_folder, as_pipe, cut, edited, removed, written

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DEEP = "[" * 100_000


def _config(**changes: Any) -> Change:
    return edited("config.json", lambda config: config.update(changes))


def _header(content: str) -> Change:
    return written(_WEIGHTS, struct.pack("<Q", len(content)) + content.encode())


def _tensor(**changes: Any) -> Change:
    return _header(json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}))


_CHECKPOINTS: list[tuple[str, Change, str]] = [
    ("config of null", written("config.json", "null"), "it holds null, not an object"),
    ("config of a list", written("config.json", "[]"), "it holds a list, not an object"),
    ("empty config", written("config.json", ""), "malformed JSON"),
    ("deep config", written("config.json", _DEEP), "it nests deeper than can be read"),
    ("config in UTF-16", written("config.json", "{}".encode("utf-16")), "not UTF-8"),
    ("doubled key", written("config.json", '{"model_type": "llama", "model_type": "llama"}'), "'model_type' twice"),
    ("config is a folder", as_folder("config.json"), "it is a folder"),
    ("config is a pipe", as_pipe("config.json"), "is a pipe, a socket or a device"),
    ("no config", removed("config.json"), "it has no config.json"),
    ("config of nothing", written("config.json", "{}"), "the config of"),
    ("unknown model", written("config.json", '{"model_type": "none"}'), "the config of"),
    ("no language model", written("config.json", '{"model_type": "vit"}'), "no causal language model"),
    ("vocabulary of 0", _config(vocab_size=0), "the config"),
    ("vocabulary of -1", _config(vocab_size=-1), "the config"),
    ("vocabulary of text", _config(vocab_size="x"), "the config of"),
    ("vocabulary too large", _config(vocab_size=321), "has shape 320 x 64, and the config asks for 321 x 64"),
    ("vocabulary too small", _config(vocab_size=300), "has shape 320 x 64, and the config asks for 300 x 64"),
    ("padding outside", _config(vocab_size=100), "has a vocabulary of 100 and pads with token 256"),
    ("vocabulary beyond memory", _config(vocab_size=10**18), "the config"),
    ("hidden size too large", _config(hidden_size=128), "has shape 320 x 64, and the config asks for 320 x 128"),
    ("hidden size of 0", _config(hidden_size=0), "the config"),
    ("MLP of another size", _config(intermediate_size=96), "and the config asks for 96 x 64"),
    ("too many layers", _config(num_hidden_layers=9), "weights of its architecture, such as model.layers.2."),
    ("layers beyond memory", _config(num_hidden_layers=10**9), "asks for 1000000000 layers"),
    ("no layers", _config(num_hidden_layers=0), "asks for 0 layers"),
    ("layers of -1", _config(num_hidden_layers=-1), "asks for -1 layers"),
    ("three heads", _config(num_attention_heads=3), "the config"),
    ("no heads", _config(num_attention_heads=0), "the config"),
    ("heads of another size", _config(head_dim=33), "the config"),
    ("unknown activation", _config(hidden_act="none"), "makes no model"),
    ("no context", _config(max_position_embeddings=0), "max_position_embeddings = 0"),
    ("context of -5", _config(max_position_embeddings=-5), "max_position_embeddings = -5"),
    ("context of 5", _config(max_position_embeddings=5), "exceeds the model's context of 5"),
    ("context of text", _config(max_position_embeddings="many"), "the config of"),
    ("no weights", removed(_WEIGHTS), "holds no .safetensors weights"),
    ("empty weights", written(_WEIGHTS, b""), "not an intact safetensors file"),
    ("weights cut off", cut(_WEIGHTS), "not an intact safetensors file"),
    ("weights of zeros", written(_WEIGHTS, bytes(8)), "its header does not fit"),
    ("header without end", written(_WEIGHTS, b"\xff" * 8 + b"{}"), "its header does not fit"),
    ("header of null", _header("null"), "it holds null, not an object"),
    ("header of nothing", _header("{}"), "its files hold 0 weights"),
    ("deep header", _header(_DEEP), "it nests deeper than can be read"),
    ("tensor of nothing", _header('{"a": 3}'), "describes no tensor under 'a'"),
    ("shape of text", _tensor(shape=["x"]), "describes no tensor under 'a'"),
    ("shape of -1", _tensor(shape=[-1]), "describes no tensor under 'a'"),
    ("offsets that go back", _tensor(data_offsets=[8, 0]), "describes no tensor under 'a'"),
    ("weights are a folder", as_folder(_WEIGHTS), "it is a folder"),
    ("weights are a pipe", as_pipe(_WEIGHTS), "is a pipe, a socket or a device"),
    ("index of null", written(_INDEX, "null"), "is no index of weights"),
    ("index of a list", written(_INDEX, '{"weight_map": []}'), "is no index of weights"),
    ("index of numbers", written(_INDEX, '{"weight_map": {"a": 3}}'), "is no index of weights"),
    ("index of what is not there", written(_INDEX, '{"weight_map": {"a": "b.safetensors"}}'), "lacks b.safetensors"),
    ("deep index", written(_INDEX, _DEEP), "it nests deeper than can be read"),
    ("tokenizer of null", written("tokenizer.json", "null"), "the tokenizer of"),
    ("empty tokenizer", written("tokenizer.json", ""), "the tokenizer of"),
    ("deep tokenizer", written("tokenizer.json", _DEEP), "the tokenizer of"),
    ("tokenizer is a folder", as_folder("tokenizer.json"), "it is a folder"),
    ("tokenizer is a pipe", as_pipe("tokenizer.json"), "is a pipe, a socket or a device"),
    ("tokenizer's config of a list", written("tokenizer_config.json", "[]"), "it holds a list, not an object"),
    ("tokenizer's deep config", written("tokenizer_config.json", _DEEP), "it nests deeper than can be read"),
    ("sampling defaults of null", written("generation_config.json", "null"), "it holds null, not an object"),
    ("template that fails", written("chat_template.jinja", "{{ raise_exception('') }}"), "failed on prompt sums-0"),
    ("template that is none", written("chat_template.jinja", "{% for %}"), "failed on prompt sums-0"),
]
_BY_OTHERS: list[tuple[str, Change, str]] = [
    ("vocabulary too small", _config(vocab_size=300), "the config asks for 300 x 64"),
    ("too many layers", _config(num_hidden_layers=9), "weights of its architecture"),
    ("deep config", written("config.json", _DEEP), "it nests deeper than can be read"),
]

ROWS = [
    *(
        Bad("compare --model {changed} --prompts sums:easy --out {out}", words, of="tiny", change=change, name=name)
        for name, change, words in _CHECKPOINTS
    ),
    *(
        Bad(f"{command} --model {{changed}} --out {{out}}", words, of="tiny", change=change, name=name)
        for command in ("train", "evaluate", "headroom", "localize")
        for name, change, words in _BY_OTHERS
    ),
]
