import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.config.model import DEFAULT_NUM_PROMPTS, PromptSettings
from mismatch_probe.errors import MissingExtra, UsageError
from mismatch_probe.tasks import Prompt, load_prompts

QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def load(source: object, num_prompts: int | None = 1) -> list[Prompt]:
    return load_prompts(PromptSettings(source=str(source), num_prompts=num_prompts))


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows: object):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def test_a_prompt_column_holds_text_or_messages(jsonl):
    plain, chat = load(jsonl({"prompt": "Hi", "answer": 4}, {"prompt": QUESTION}), 2)
    assert plain == Prompt("row-0", text="Hi", answer="4")
    assert chat == Prompt("row-1", messages=QUESTION)


def test_a_conversation_is_asked_again_without_its_last_assistant_turn(jsonl):
    [prompt] = load(jsonl({"messages": [*QUESTION, {"role": "assistant", "content": "4"}]}))
    assert prompt.messages == QUESTION


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text('{"prompt": "Hi"}\n', encoding="utf-8-sig")
    assert load(path) == [Prompt("row-0", text="Hi")]


def test_recorded_token_ids_are_taken_as_they_are(jsonl):
    [prompt] = load(jsonl({"prompt_token_ids": [5, 0, 7], "data_source": "logs"}))
    assert prompt.token_ids == [5, 0, 7]


def test_the_parquet_of_verl_gives_messages_and_the_ground_truth(tmp_path):
    row = {"data_source": "gsm8k", "prompt": QUESTION, "reward_model": {"style": "rule", "ground_truth": "4"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    assert load(tmp_path / "train.parquet") == [Prompt("row-0", messages=QUESTION, answer="4")]


def test_keys_that_parquet_adds_as_nulls_do_not_reach_the_chat_template(tmp_path):
    turns = [{"role": "system", "content": "Be brief.", "name": "me"}, *QUESTION]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "chat.parquet")
    assert load(tmp_path / "chat.parquet")[0].messages == turns


def test_a_small_file_is_read_whole_unless_more_was_asked_for(jsonl):
    path = jsonl(*[{"prompt": f"Hi {number}"} for number in range(3)])
    assert len(load(path, None)) == 3
    with pytest.raises(UsageError, match="holds 3 prompts, fewer than the 4 asked for; give --num-prompts 3"):
        load(path, 4)


@pytest.mark.parametrize("source", ["file", "sums:easy"])
def test_of_a_large_source_the_default_number_is_read(jsonl, source):
    path = jsonl(*[{"prompt": f"Hi {number}"} for number in range(DEFAULT_NUM_PROMPTS + 1)])
    assert len(load(path if source == "file" else source, None)) == DEFAULT_NUM_PROMPTS


def test_equal_prompts_keep_ids_of_their_own(jsonl):
    assert [prompt.prompt_id for prompt in load(jsonl({"prompt": "Hi"}, {"prompt": "Hi"}), 2)] == ["row-0", "row-1"]


def test_blank_lines_are_skipped_but_counted_where_a_line_is_named(jsonl):
    assert len(load(jsonl("", {"prompt": "a"}, "", {"prompt": "b"}), 2)) == 2
    with pytest.raises(UsageError, match="line 3"):
        load(jsonl("", {"prompt": "a"}, "{"), 2)


def test_lines_after_the_last_prompt_asked_for_are_not_read(jsonl):
    assert len(load(jsonl({"prompt": "a"}, "broken"), 1)) == 1


@pytest.mark.slow
def test_a_hub_data_set_may_be_a_folder_of_data_files(tmp_path):
    pytest.importorskip("datasets")
    rows = [{"prompt": "Hi", "answer": "there"}, {"prompt": "Yo", "answer": "you"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert [prompt.answer for prompt in load(f"hub:{tmp_path}", 2)] == ["there", "you"]
    with pytest.raises(UsageError, match="validation"):
        load(f"hub:{tmp_path}:validation")


@pytest.mark.parametrize("source", ["hub:", "hub::train"])
def test_a_hub_source_without_a_name_is_one_sentence(source):
    with pytest.raises(UsageError, match="names no data set"):
        load(source)


def test_a_hub_data_set_without_the_package_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"mismatch-probe\[datasets\]"):
        load("hub:owner/name")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (["{"], r"line 1 of [^ ]* cannot be read \(malformed JSON: [^()]* at column 2\)"),
        (['{"prompt": ["a",'], r"line 1 of [^ ]* cannot be read \(malformed JSON: [^()]* at column 17\)"),
        (['{"prompt": "a\tb"}'], "Invalid control character at column 14"),
        (['{"prompt":' + "[" * 100_000], "line 1 .* nests deeper"),
        ([r'{"prompt": "\ud800"}'], "line 1 .* surrogate"),
        (['["prompt"]'], "line 1 .* holds a list, not an object"),
        ([{"question": "Hi", "level": 3}], "has no prompt .*question, level"),
        ([{"prompt": None}], "has no prompt"),
        ([{"prompt": "Hi", "messages": QUESTION}], "both prompt and messages"),
        ([{"prompt": 7}], "prompt is no text or messages"),
        ([{"messages": [{"role": "user"}]}], "messages is no messages"),
        ([{"messages": [{"role": "assistant", "content": "4"}]}], "no turn to answer"),
        ([{"prompt_token_ids": [1, -2]}], "no list of token ids"),
        ([{"prompt_token_ids": [True]}], "no list of token ids"),
        ([], "is empty"),
    ],
)
def test_a_row_that_is_no_prompt_is_named_with_the_reason(jsonl, rows, sentence):
    with pytest.raises(UsageError, match=sentence):
        load(jsonl(*rows))


def test_a_file_of_another_ending_and_a_folder_are_refused_as_what_they_are(tmp_path):
    (tmp_path / "prompts.txt").write_text("Hi\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"is a file that ends in neither \.jsonl nor \.parquet; give --prompts"):
        load(tmp_path / "prompts.txt")
    with pytest.raises(UsageError, match="is a folder; give --prompts"):
        load(tmp_path / "folder")
    with pytest.raises(UsageError, match="is unknown; give --prompts a built-in task"):
        load(tmp_path / "absent.txt")


def test_fewer_prompts_than_asked_for_are_refused_with_their_number(jsonl):
    with pytest.raises(UsageError, match="give --num-prompts 1"):
        load(jsonl({"prompt": "Hi"}), 3)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "absent.parquet")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UsageError, match="not UTF-8"):
        load(tmp_path / "latin.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UsageError, match="no readable parquet"):
        load(tmp_path / "broken.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        load(tmp_path / "folder.jsonl")


def test_a_file_of_another_kind_is_refused_with_the_kinds_that_are_read():
    with pytest.raises(UsageError, match=r"\.jsonl or \.parquet"):
        load("prompts.csv")


def test_a_prompt_has_exactly_one_form():
    with pytest.raises(ValueError, match="exactly one"):
        Prompt("row-0", text="Hi", token_ids=[1])
    with pytest.raises(ValueError, match="exactly one"):
        Prompt("row-0")
