"""Rows of bad input: settings files, prompt files, gate files, guard files."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.cli.bad_rows import BROKEN, Bad, Content
from tests.gate.cli import GOOD

_DIGITS = "9" * 5000
_DEEP = 100_000


def _parquet(columns: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


_SETTINGS: list[tuple[str, Content, str]] = [
    (".toml", "[sampling]\nmax_new_tokens = true", "'sampling.max_new_tokens'"),
    (".toml", "[sampling]\nmax_new_tokens = 8.0", "'sampling.max_new_tokens'"),
    (".toml", '[sampling]\nmax_new_tokens = "8"', "'sampling.max_new_tokens'"),
    (".toml", "[sampling]\nmax_new_tokens = 9223372036854775808", "'sampling.max_new_tokens'"),
    (".toml", "[sampling]\ntemperature = true", "'sampling.temperature'"),
    (".toml", "[sampling]\nignore_eos = 1", "'sampling.ignore_eos'"),
    (".toml", "[sampling]\ntop_p = nan", "it holds nan"),
    (".toml", "[sampling]\ntop_p = -inf", "it holds -inf"),
    (".toml", "[sampling]\ntop_k = -1", "'sampling.top_k'"),
    (".toml", "[sampling]\nseed = false", "'sampling.seed'"),
    (".toml", "pairs = []", "no dtype to compare"),
    (".toml", "pairs = [[]]", "write a pair as"),
    (".toml", 'pairs = [["bf16", 3]]', "'pairs.0.1'"),
    (".toml", "pairs = [[true, true]]", "'pairs.0.0'"),
    (".toml", 'confidence = "high"', "'confidence'"),
    (".toml", "confidence = 1", "'confidence'"),
    (".toml", "prompts = 3", "'prompts' is not usable: it must be a table"),
    (".toml", "sampling = []", "'sampling' is not usable: it must be a table"),
    (".toml", "[prompts]\nsource = 3", "'prompts.source'"),
    (".toml", '[prompts]\nsource = "\\u0000.jsonl"', "NUL byte"),
    (".toml", "[engine.args]\nmax_num_seqs = true", "--vllm.max_num_seqs takes a whole number"),
    (".toml", "[engine.args]\nblock_size = 0", "--vllm.block_size 0 cannot be used"),
    (".toml", "[engine]\nargs = []", "'engine.args'"),
    (".toml", "[training]\nlm_head_dtype = 3", "'training.lm_head_dtype'"),
    (".toml", '[training]\ndevice_map = "nowhere"', "training.device_map 'nowhere' cannot be used"),
    (".toml", "[floors]\nnum_sequences = -3", "'floors.num_sequences'"),
    (".toml", "sampling.zeal = 1", "'sampling.zeal' is unknown"),
    (".toml", "seed = 1979-05-27", "it holds the date or time 1979-05-27"),
    (".toml", "a = 1\na = 2", "malformed"),
    (".toml", "a = " + "[" * 3000, "it nests deeper than can be read"),
    (".toml", "a = " + _DIGITS, "cannot be read"),
    (".toml", "a = {b = 1", "malformed"),
    (".toml", b"a = '\xff'", "not UTF-8"),
    (".toml", "a = 1".encode("utf-16"), "not UTF-8"),
    (".yaml", "a: 1\na: 2", "it names the key 'a' twice"),
    (".yaml", "a: {b: 1, b: 1}", "it names the key 'b' twice"),
    (".yaml", "a: " + "[" * 3000, "it nests deeper than can be read"),
    (".yaml", "&a [*a]", "it nests deeper than can be read"),
    (".yaml", "a: " + _DIGITS, "cannot be read"),
    (".yaml", "a: .nan", "it holds nan"),
    (".yaml", "1: 2", "its key 1 is no text"),
    (".yaml", "- a", "its top level must be a table"),
    (".yaml", "null", "its top level must be a table"),
    (".yaml", "", "its top level must be a table"),
    (".yaml", "a: !!binary aGk=", "it holds a bytes"),
    (".yaml", "a: !!timestamp x", "cannot be read"),
    (".yaml", "a: !!python/object:os.system x", "malformed"),
    (".yaml", 'a: "\\ud800"', "half a surrogate pair"),
    (".yaml", "a: \x00", "malformed"),
    (".json", "{}", "is neither .toml nor .yaml"),
]

_PROMPTS: list[tuple[str, Content, str]] = [
    (".jsonl", f'{{"prompt_token_ids": [{_DIGITS}]}}', "a number of more digits than can be read"),
    (".jsonl", f'{{"prompt_token_ids": [{"9" * 4000}]}}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": [9223372036854775808]}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": [320]}', "outside the model's vocabulary of 320"),
    (".jsonl", '{"prompt_token_ids": [-1]}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": [1.0]}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": [true]}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": "12"}', "is no list of token ids"),
    (".jsonl", '{"prompt_token_ids": []}', "has no tokens"),
    (".jsonl", '{"prompt": "a", "prompt": "b"}', "it names the key 'prompt' twice"),
    (".jsonl", '{"prompt": "a", "x": {"y": 1, "y": 2}}', "it names the key 'y' twice"),
    (".jsonl", '{"prompt": "a", "x": NaN}', "it holds NaN"),
    (".jsonl", '{"prompt": "a", "x": 1e999}', "it holds '1e999'"),
    (".jsonl", '{"prompt": 1}', "prompt is no text or messages"),
    (".jsonl", '{"prompt": []}', "has no turn to answer"),
    (".jsonl", '{"prompt": null}', "has no prompt"),
    (".jsonl", '{"prompt": [{"role": "user"}]}', "prompt is no text or messages"),
    (".jsonl", '{"messages": "x"}', "messages is no messages"),
    (".jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "has no chat template"),
    (".jsonl", '{"prompt": "a", "messages": []}', "has both prompt and messages"),
    (".jsonl", '{"prompt": "\\ud800"}', "half a surrogate pair"),
    (".jsonl", '{"prompt": "a"} {"prompt": "b"}', "Extra data at column 17"),
    (".jsonl", "[]", "it holds a list, not an object"),
    (".jsonl", "null", "it holds null, not an object"),
    (".jsonl", "3", "it holds a number, not an object"),
    (".jsonl", "[" * _DEEP, "it nests deeper than can be read"),
    (".jsonl", '{"prompt": "\x00"}', "malformed JSON"),
    (".jsonl", '{"prompt": "' + "a" * 3000 + '"}', "/file.jsonl) has 3000 tokens"),
    (".jsonl", "\n \n", "is empty"),
    (".jsonl", "", "is empty"),
    (".jsonl", '{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    (".parquet", b"", "is no readable parquet"),
    (".parquet", b"PAR1" + bytes(100) + b"PAR1", "is no readable parquet"),
    (".parquet", _parquet({"prompt": ["a"] * 100})[:-8], "is no readable parquet"),
    (".parquet", _parquet({"prompt": pa.array([], pa.string())}), "is empty"),
    (".parquet", _parquet({"prompt": [1]}), "prompt is no text or messages"),
    (".parquet", _parquet({"prompt": [b"\xff"]}), "prompt is no text or messages"),
    (".parquet", _parquet({"prompt": pa.array([None], pa.string())}), "has no prompt"),
    (".parquet", _parquet({"prompt_token_ids": [["a"]]}), "is no list of token ids"),
    (".parquet", _parquet({"prompt_token_ids": [[1.5]]}), "is no list of token ids"),
    (".parquet", _parquet({"prompt_token_ids": [[2**60]]}), "is no list of token ids"),
    (".parquet", _parquet({"x": [1]}), "has no prompt"),
]

_CHECK = "[gate]\n" + GOOD
_GATES: list[tuple[Content, str]] = [
    ("", "has no [gate] table"),
    ("gate = 3", "has no [gate] table"),
    ("[gate]", "asks for nothing"),
    ("[gate]\ncheck = 3", "gate.check is no list of tables"),
    ("[gate]\ncheck = [3]", "gate.check is no list of tables"),
    ("[gate]\nalpha = 0\n" + GOOD, "'alpha'"),
    ("[gate]\nalpha = true\n" + GOOD, "'alpha'"),
    ('[gate]\nalpha = "0.05"\n' + GOOD, "'alpha'"),
    ("[gate]\nmin_sequences = true\n" + GOOD, "'min_sequences'"),
    ("[gate]\nmin_sequences = 99999999999999999999\n" + GOOD, "'min_sequences'"),
    ("[gate]\nmin_sequences = 64\nmax_sequences = 32\n" + GOOD, "is below min_sequences"),
    ('[gate]\non_inconclusive = "maybe"\n' + GOOD, "'on_inconclusive'"),
    ('[gate]\npreset = "none"\n' + GOOD, "'preset'"),
    ("[gate]\nfloor = 3\n" + GOOD, "'floor'"),
    ('[gate]\nfloor = "none.json"\n' + GOOD, "none.json does not exist"),
    (_CHECK + "min = 0.1", "both max and min given"),
    (_CHECK + 'agg = "p42"', "'agg'"),
    (_CHECK + "agg = []", "'agg'"),
    (_CHECK + 'slice = "x"', "'slice' is not usable: it must be a table"),
    (_CHECK + 'slice = {pair = "fp8"}', "asks for the pair fp8/fp8"),
    (_CHECK + "slice = {pair = 3}", "is no pair of sides"),
    (_CHECK + 'slice = {position = "5:2"}', "is empty"),
    (_CHECK + f'slice = {{position = "{_DIGITS}:"}}', "is no range"),
    (_CHECK + "clip = 99", "'clip'"),
    (_CHECK + "level = true", "'level'"),
    (_CHECK + GOOD, "is given twice"),
    (_CHECK + "wish = 1", "'wish' is unknown"),
    ('[gate]\n[[gate.check]]\nmetric = ["a"]\nmax = 1', "'metric'"),
    ('[gate]\n[[gate.check]]\nmetric = "kl_k33"\nmax = 1', "metric 'kl_k33' is unknown"),
    ('[gate]\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = true', "'max'"),
    ('[gate]\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = -1', "the limit cannot be kept"),
    ('[gate]\n[[gate.check]]\nmetric = "abs_logprob_diff"\nmax = inf', "it holds inf"),
    ('[gate]\n[[gate.check]]\nmetric = "abs_logprob_diff"', "no limit given"),
]
_BROKEN_FLOORS = ["/dev/zero", "..", "file.toml"]


def _guard(**changes: str) -> str:
    values = {"name": '"a"', "rule": '"limit"', "metric": '"mismatch/kl_k3"', "above": "1", "actions": '["warn"]'}
    return "[[guard]]\n" + "".join(f"{key} = {value}\n" for key, value in (values | changes).items() if value)


_GUARDS: list[tuple[Content, str]] = [
    ("guard = 3", "guard is no list of tables"),
    ("defaults = 1", "'defaults'"),
    ("off = [3]", "'off.0'"),
    ('off = ["none"]', "off names 'none'"),
    ("defaults = false", "leaves no guard"),
    (_guard() + _guard(), "is declared twice"),
    (_guard(wish="1"), "'wish' is unknown"),
    (_guard(patience="true"), "'patience'"),
    (_guard(patience="99999999999999999999"), "'patience'"),
    (_guard(warmup="-1"), "'warmup'"),
    (_guard(above="true"), "'above'"),
    (_guard(above="inf"), "it holds inf"),
    (_guard(above=""), "no limit given"),
    (_guard(name="3"), "'name'"),
    (_guard(rule='"law"'), "unknown rule 'law'"),
    (_guard(rule="3"), "unknown rule 3"),
    (_guard(metric='"none"'), "reads 'none', which no step gives"),
    (_guard(metric="3"), "'metric'"),
    (_guard(actions="[]"), "no list of actions"),
    (_guard(actions="[3]"), "'actions'"),
    (_guard(actions='["dance"]'), "dance"),
]

_WITH_SETTINGS = "compare --model demo --config {file} --out {out}"
_WITH_PROMPTS = "compare --model {tiny} --prompts {file} --num-prompts 1 --out {out}"
_WITH_GUARDS = "train --model demo --guards {file} --out {out}"


def _with_gate(content: Content, words: str, code: Any = Bad.code) -> Bad:
    return Bad("gate {changed} --config {file}", words, code, (".toml", content), "run", lambda folder: None)


ROWS = [
    *(Bad(_WITH_SETTINGS, words, file=(suffix, content)) for suffix, content, words in _SETTINGS),
    *(Bad(_WITH_PROMPTS, words, file=(suffix, content)) for suffix, content, words in _PROMPTS),
    *(_with_gate(content, words) for content, words in _GATES),
    *(_with_gate(f'[gate]\nfloor = "{path}"\n{GOOD}', "cannot be read", BROKEN) for path in _BROKEN_FLOORS),
    *(Bad(_WITH_GUARDS, words, file=(".toml", content)) for content, words in _GUARDS),
]
