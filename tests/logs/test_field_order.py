"""A format is recognised and read in whichever order its writer puts the fields."""

import json
import pickle
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import FORMATS, recognise
from mismatch_probe.records.sequences import KeptSets, LoggedResponse
from tests.logs.reading import DATA, lines_of, read, written

VERL = Path(__file__).parent / "field_order" / "tq_batch.pt"
SAMPLES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
ENDINGS = {name: FORMATS.built_in[name].files(DATA / name)[0].suffix for name in SAMPLES}
IN_LINES, IN_TABLES = (
    [name for name, suffix in ENDINGS.items() if suffix == ending] for ending in (".jsonl", ".parquet")
)
ORDERS = range(5)
PLACES = {"where", "step", "group", "trajectory", "weight_version", "finish_reason"}
"""Fields that may be made of the name of a file."""


def shuffled(value: Any, rng: random.Random) -> Any:
    """`value` with the keys of every dictionary in it in another order."""
    if isinstance(value, dict):
        keys = sorted(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def require_equal(responses: list[LoggedResponse], others: list[LoggedResponse]) -> None:
    for one, other in zip(responses, others, strict=True):
        for field in one.__dataclass_fields__.keys() - PLACES:
            values = getattr(one, field), getattr(other, field)
            parts = [vars(value) if isinstance(value, KeptSets) else {"": value} for value in values]
            for part in parts[0] | parts[1]:
                np.testing.assert_array_equal(parts[0].get(part), parts[1].get(part), err_msg=f"{field} {part}")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", IN_LINES)
def test_lines_with_keys_in_another_order_are_the_same_format(name, order, tmp_path):
    file = FORMATS.built_in[name].files(DATA / name)[0]
    rows = [shuffled(row, random.Random(order)) for row in lines_of(file)]
    path = written(tmp_path / "step_1.jsonl", rows)
    assert recognise(path).name == name
    if FORMATS.built_in[name].prompts is None:
        require_equal(read(path)[0], list(FORMATS.built_in[name].read(file, lambda finding: None)))


@pytest.mark.parametrize("name", IN_TABLES)
def test_tables_with_columns_in_another_order_are_the_same_format(name, tmp_path):
    table = pq.read_table(FORMATS.built_in[name].files(DATA / name)[0])
    pq.write_table(table.select(table.column_names[::-1]), tmp_path / "a.parquet")
    assert recognise(tmp_path).name == name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["slime", "slime_rollout", "miles_train"])
def test_torch_files_with_keys_in_another_order_are_the_same_format(name, order, tmp_path):
    folder = DATA / ("miles/train_data" if name == "miles_train" else "slime")
    file = FORMATS.built_in[name].files(folder)[0]
    torch.save(shuffled(torch.load(file), random.Random(order)), tmp_path / "0.pt")
    assert recognise(tmp_path).name == name
    if FORMATS.built_in[name].why_not is None:
        require_equal(read(tmp_path)[0], list(FORMATS.built_in[name].read(file, lambda finding: None)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_of_skyrl_with_columns_in_another_order_is_the_same_format(order, tmp_path):
    file = FORMATS.built_in["skyrl"].files(DATA / "skyrl")[0]

    class Names(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return {"_rebuild_tensor_batch": lambda kind, state: state}.get(name, lambda *_: None)

    state = shuffled(Names(BytesIO(file.read_bytes())).load(), random.Random(order))
    body = pickle.dumps((None, state), protocol=3)[2:-1]
    name = b"skyrl.backends.skyrl_train.training_batch\n_rebuild_tensor_batch\n"
    (tmp_path / "a.pkl").write_bytes(b"\x80\x03c" + name + body + b"R.")
    assert recognise(tmp_path).name == "skyrl"
    require_equal(read(tmp_path)[0], list(FORMATS.built_in["skyrl"].read(file, lambda finding: None)))


def test_a_batch_of_verl_with_fields_without_tensors_first_and_locked_is_the_same_format():
    """Written by tensordict itself: `num_turns` and four more before the tensors, and `tensordict` after the tags."""
    assert recognise(VERL).name == "verl"
    assert recognise(VERL.parent).name == "verl"
    first = FORMATS.built_in["verl"].files(DATA / "verl")[0]
    require_equal(read(VERL, "verl")[0], list(FORMATS.built_in["verl"].read(first, lambda finding: None)))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_rollout_dump_whose_long_lists_stand_first_is_the_same_format(protocol, tmp_path):
    sample = {"metadata": {"text": "x" * 3 * 2**20}, "tokens": list(range(5000)), "response_length": 2}
    sample |= {"rollout_log_probs": [-0.5, -0.25], "weight_versions": ["1"]}
    torch.save({"samples": [sample], "rollout_id": 3}, tmp_path / "3.pt", pickle_protocol=protocol)
    assert recognise(tmp_path).name == "slime_rollout"
    [response] = read(tmp_path)[0]
    assert (response.token_ids.tolist(), response.step) == ([4998, 4999], 3)


@pytest.mark.parametrize(("name", "failed"), [("vllm_responses", {"error": "busy"}), ("tinker", {"samples": None})])
def test_a_first_call_that_failed_does_not_hide_the_format(name, failed, tmp_path):
    file = FORMATS.built_in[name].files(DATA / name)[0]
    rows = lines_of(file)
    first = failed if name == "vllm_responses" else rows[0] | failed
    path = written(tmp_path / "a.jsonl", [first, *rows])
    assert recognise(path).name == name
    require_equal(read(path)[0], list(FORMATS.built_in[name].read(file, lambda finding: None)))


def test_a_torch_file_of_something_else_is_of_no_format(tmp_path):
    """Words in a text, or with letters before and behind, are no names of fields."""
    words = "format_version rollout_id samples tensordict responses"
    torch.save({"note": words, "my_samples": 1, "rollout_ids": json.dumps(words)}, tmp_path / "0.pt")
    with pytest.raises(UsageError, match="known format"):
        recognise(tmp_path)
