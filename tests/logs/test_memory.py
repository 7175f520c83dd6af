"""Small files that mean much: refused in a sentence, or read, and never in much memory."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import UsageError
from mismatch_probe.logs import FORMATS
from tests.logs.test_hostile import ROW, torch_saved

pytestmark = pytest.mark.slow

MOST_MIB = 1024


class Reader:
    """A process that has imported what reads logs, and is forked for each."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.logs.memory"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def within(self, path: Path, name: str | None = None) -> tuple[int, str]:
        """How many rows a process of its own reads, and the sentence that it ends with."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(path), name]), file=self._process.stdin, flush=True)
        shown = self._process.stdout.readline()
        assert shown, "the process that read it was ended"
        mib, rows, sentence = shown.rstrip("\n").split("\t")
        assert float(mib) < MOST_MIB, shown
        assert not sentence or str(path) in sentence
        return int(rows), sentence

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    with closing(Reader()) as running:
        yield running


def table(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def lists(values: np.ndarray, ends: list[int]) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), pa.array(values))


def test_a_row_of_8_million_equal_ids_is_refused_before_it_is_decoded(reader, tmp_path):
    ids = lists(np.zeros(8_000_000, np.int32), [8_000_000])
    path = table(tmp_path / "a.parquet", {"prompt_token_ids": [[1]], "token_ids": ids, "logprobs": [[-0.5]]})
    assert path.stat().st_size < 4000
    assert "column token_ids of its row group 0 has a row with more than 4,194,304 values" in reader.within(path)[1]


def test_a_long_row_among_short_ones_is_refused_by_its_place(reader, tmp_path):
    ids = lists(np.zeros(6_000_000, np.int32), [1, 2, 5_999_999, 6_000_000])
    few = [[1]] * 4
    path = table(tmp_path / "a.parquet", {"prompt_token_ids": few, "token_ids": ids, "logprobs": [[-0.5]] * 4})
    assert "column token_ids of its row 2 has 5,999,997 values" in reader.within(path)[1]


def test_many_rows_in_few_bytes_are_refused(reader, tmp_path):
    ids = lists(np.zeros(2**18 + 1, np.int32), list(range(1, 2**18 + 2)))
    path = table(tmp_path / "a.parquet", {"prompt_token_ids": ids, "token_ids": ids, "logprobs": ids})
    assert "262,145 rows in" in reader.within(path)[1]


@pytest.mark.parametrize("name", ["plain", pytest.param("trl", marks=pytest.mark.slow)])
def test_a_large_text_that_many_rows_share_is_kept_once(name, reader, tmp_path):
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 960, pa.int32()), ["x" * 4_000_000])
    columns = {column: [value] * 960 for column, value in ROW.items()} | {"group": text}
    if name == "trl":
        columns = {"step": [1] * 960, "prompt": text, "completion": ["a"] * 960}
    path = table(tmp_path / "a.parquet", columns, compression="zstd")
    rows, sentence = reader.within(path)
    if name == "trl":
        assert (rows, sentence) == (1, "")
    else:
        assert "row 0 of" in sentence
        assert "group is a text of more than 4,096 characters" in sentence


def test_messages_that_share_a_large_text_are_refused_by_their_row(reader, tmp_path):
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 960, pa.int32()), ["x" * 4_000_000])
    messages = pa.ListArray.from_arrays([0, 960], pa.StructArray.from_arrays([text], ["content"]))
    path = table(tmp_path / "a.parquet", {"step": [1], "prompt": messages, "completion": ["a"]}, compression="zstd")
    assert "column prompt of its row 0 is more than 256 MiB" in reader.within(path)[1]


def test_a_line_of_very_many_empty_objects_is_refused(reader, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW) + '\n{"a": [' + "{}," * 40_000_000 + "{}]}\n")
    rows, sentence = reader.within(path, "plain")
    assert rows == 1
    assert "line 2 of" in sentence
    assert "would take more than 1 GiB of memory" in sentence


def test_a_long_line_of_numbers_is_read(reader, tmp_path):
    path, length = tmp_path / "a.jsonl", 3_000_000
    path.write_text(json.dumps(ROW | {"token_ids": list(range(length)), "logprobs": [-0.123456] * length}) + "\n")
    assert reader.within(path) == (1, "")


def test_a_text_that_the_samples_of_a_dump_share_is_not_joined_for_each(reader, tmp_path):
    versions = ["1" * 10_000_000, "2" * 10_000_000]
    sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-0.5], "weight_versions": versions}
    samples = [dict(sample) for _ in range(300)]
    path = torch_saved(tmp_path / "0.pt", pickle.dumps({"rollout_id": 0, "samples": samples}, protocol=2))
    assert "sample 0 of" in (sentence := reader.within(path)[1])
    assert "weight_versions is a text of more than 4,096 characters" in sentence


def test_a_pickle_of_very_many_empty_dictionaries_is_refused(tmp_path):
    path = torch_saved(tmp_path / "0.pt", b"\x80\x02(" + b"}" * 13_000_000 + b"l.")
    with pytest.raises(UsageError, match=r"cannot be read \(it is a pickle that makes more than 1,073,741,824 bytes"):
        list(FORMATS.built_in["slime_rollout"].read(path, pytest.fail))


def test_keys_that_no_log_has_are_not_kept(reader, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW | {f"key{number}": 0 for number in range(2000)}) + "\n")
    assert "more than 1,024 keys" in reader.within(path)[1]
