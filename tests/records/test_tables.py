import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.sequences import EncodedPrompt, IntArray, ScoredSequence, TokenSequence, leg_columns
from mismatch_probe.records.tables import (
    ids_key,
    in_order,
    leg_rows,
    leg_schema,
    leg_table,
    prompts_of,
    prompts_table,
    read_table,
    sequences_of,
    write_table,
)
from mismatch_probe.stats.sequences import TokenPair

SEQUENCES = [TokenSequence("a", [1, 2], [3, 4, 5]), TokenSequence("b", [1], [6])]
SCORES = [
    ScoredSequence("a", np.array([-0.1, -0.2, -0.3]), np.array([3, 9, 5], dtype=np.int32), np.array([0.5, 0.6, 0.7])),
    ScoredSequence("b", np.array([np.nan])),
]


def test_a_leg_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_table(tmp_path / "leg.parquet", leg_table(SEQUENCES, SCORES))
    rows = read_table(tmp_path / "leg.parquet").to_pylist()
    assert rows[0]["logprobs"] == [np.float32(-0.1), np.float32(-0.2), np.float32(-0.3)]
    assert rows[0]["top1_ids"] == [3, 9, 5]
    assert np.isnan(rows[1]["logprobs"][0])
    assert rows[1]["entropy_nats"] is None


def test_columns_that_may_be_null_can_be_absent_and_no_other() -> None:
    columns: dict[str, list[Any]] = {"id": ["a"], "ids_key": [3], "logprobs": [[-0.5, -1.0]]}
    [row] = leg_rows(columns).to_pylist()
    of_row = {name: values[0] for name, values in columns.items()}
    assert row == {**of_row, "top1_ids": None, "entropy_nats": None, "start_logprobs": None}
    assert leg_rows({**columns, "top1_ids": [[7, 8]]}, double=True).schema == leg_schema(double=True)
    with pytest.raises(KeyError, match="ids_key"):
        leg_rows({"id": ["a"], "logprobs": [[-0.5]]})


def test_a_column_that_statistics_read_has_its_field_in_a_pair() -> None:
    in_pair = {one.name for one in fields(TokenPair)}
    names = {name: column.pair for name, column in leg_columns().items() if column.pair}
    assert names == {"top1_ids": "top1", "entropy_nats": "entropy"} | names
    assert not [name for name, pair in names.items() if not in_pair & {f"{pair}_pi", f"{pair}_mu"}]


@dataclass(frozen=True)
class WithRanks(ScoredSequence):
    ranks: IntArray | None = None


def test_scores_without_their_start_lose_it_in_every_field_that_has_a_value_a_token() -> None:
    per_token = {one.name: np.arange(5) for one in fields(WithRanks) if one.name not in ("id", "start_logprobs")}
    end = WithRanks("a", start_logprobs=np.array([-1.0]), **per_token).without_start(2)
    assert per_token.keys() == {"logprobs", "top1_ids", "entropy_nats", "ranks"}
    for name in per_token:
        assert getattr(end, name).tolist() == [2, 3, 4], name
    assert (end.id, end.start_logprobs) == ("a", np.array([-1.0]))
    assert ScoredSequence("a", np.zeros(3)).without_start(1).top1_ids is None


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_table(tmp_path / name, leg_table(SEQUENCES, SCORES))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_log_probs_are_byte_stream_split_and_compressed(tmp_path: Path) -> None:
    write_table(tmp_path / "leg.parquet", leg_table(SEQUENCES, SCORES))
    group = pq.read_metadata(tmp_path / "leg.parquet").row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert "BYTE_STREAM_SPLIT" in columns["logprobs.list.element"].encodings
    assert columns["logprobs.list.element"].compression == "ZSTD"


def test_a_truncated_file_is_named_and_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "leg.parquet"
    write_table(path, leg_table(SEQUENCES, SCORES))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BrokenRecord, match=r"leg\.parquet cannot be read .*; remove it and make the run again$"):
        read_table(path)


def test_a_column_that_a_table_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "leg.parquet"
    write_table(path, leg_table(SEQUENCES, SCORES))
    assert read_table(path, ["id"]).column_names == ["id"]
    with pytest.raises(BrokenRecord, match=r"leg\.parquet does not hold none: it is another file; remove it and make"):
        read_table(path, ["id", "none"])


def test_a_missing_file_says_that_the_run_is_unfinished(tmp_path: Path) -> None:
    with pytest.raises(BrokenRecord, match=r"unfinished; make the run again$"):
        read_table(tmp_path / "none.parquet")


@pytest.mark.parametrize("place", ["rollouts.parquet", "legs/train-bf16.parquet", "parts/sample-bf16/0.parquet"])
def test_a_file_of_a_run_comes_with_the_whole_command_that_makes_it_again(tmp_path: Path, place: str) -> None:
    run = tmp_path / "my run"
    path = run / place
    path.parent.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    sentence = re.escape(f"continue the run with `mismatch-probe compare --resume --out '{run}'`")
    with pytest.raises(BrokenRecord, match=f"{sentence}$"):
        read_table(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(BrokenRecord, match=f"remove it and {sentence}$"):
        read_table(path)


def test_scores_of_another_sequence_or_length_are_refused() -> None:
    with pytest.raises(BrokenRecord, match="3 log-probs of a, got 1 of b"):
        leg_table(SEQUENCES, SCORES[::-1])
    with pytest.raises(BrokenRecord, match="got 2 of b"):
        leg_table(SEQUENCES[1:], [ScoredSequence("b", np.zeros(2))])


def test_the_key_of_ids_tells_apart_other_ids_and_another_split_of_the_same() -> None:
    key = ids_key([1, 2], [3])
    assert key == ids_key([1, 2], [3])
    assert key != ids_key([1], [2, 3])
    assert key != ids_key([1, 2], [4])


def test_rows_come_in_the_order_asked_for_and_a_missing_row_is_an_error() -> None:
    table = leg_table(SEQUENCES, SCORES)
    assert in_order(table, ["b", "a"])["id"].to_pylist() == ["b", "a"]
    with pytest.raises(KeyError):
        in_order(table, ["c"])


def test_prompts_and_sequences_survive_the_file(tmp_path: Path) -> None:
    prompts = [EncodedPrompt("p", [1, 2], "hé\ud800", "4"), EncodedPrompt("q", [3], "x")]
    write_table(tmp_path / "prompts.parquet", prompts_table(prompts))
    back = prompts_of(read_table(tmp_path / "prompts.parquet"))
    assert [(p.prompt_id, p.token_ids, p.answer) for p in back] == [("p", [1, 2], "4"), ("q", [3], None)]
    assert back[0].text == "hé\\ud800"
    assert sequences_of(leg_rollouts()) == SEQUENCES


def leg_rollouts():  # type: ignore[no-untyped-def]
    import pyarrow as pa

    return pa.table(
        {
            "id": [s.id for s in SEQUENCES],
            "prompt_token_ids": [s.prompt_token_ids for s in SEQUENCES],
            "token_ids": [s.token_ids for s in SEQUENCES],
        }
    )
