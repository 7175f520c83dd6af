from pathlib import Path

import pytest

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings, read_settings_file
from mismatch_probe.errors import UsageError
from mismatch_probe.reading import differences, flat, merge_tables


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "demo"\n[sampling]\nseed = 3\n')
    (tmp_path / "run.yaml").write_text("model: {path: demo}\nsampling: {seed: 3}\n")
    toml, yaml = (read_settings_file(tmp_path / name) for name in ("run.toml", "run.yaml"))
    assert parse_settings(CompareSettings, toml) == parse_settings(CompareSettings, yaml)


@pytest.mark.parametrize(("name", "text"), [("run.toml", "a = 1"), ("run.yaml", "a: 1")])
def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_settings_file(tmp_path / name) == {"a": 1}


def test_a_flag_wins_over_the_file_and_leaves_its_neighbours() -> None:
    base = {"sampling": {"seed": 3, "temperature": 0.5}, "model": {"path": "a"}}
    assert merge_tables(base, {"sampling": {"seed": 4}}) == {
        "sampling": {"seed": 4, "temperature": 0.5},
        "model": {"path": "a"},
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"path": "a"}, "smapling": {}}, "'smapling' is unknown; did you mean 'sampling'"),
        ({"model": {"path": "a"}, "sampling": {"temprature": 1}}, "did you mean 'sampling.temperature'"),
        ({"model": {"path": "a"}, "sampling": {"temperature": 0}}, "sampling.temperature.*greater than 0"),
        ({}, "'model' is missing"),
        ({"model": {"path": "a"}, "sampling": {"temperature": float("inf")}}, "sampling.temperature.*finite"),
        ({"model": {"path": "a"}, "pairs": []}, "give --dtype"),
        ({"model": {"path": "a"}, "pairs": "bf16"}, "write a pair as"),
        ({"model": {"path": "a"}, "pairs": ["bf16", "fp16"]}, "write a pair as"),
        ({"model": {"path": "a"}, "pairs": [["bf16"]]}, "write a pair as"),
        ({"model": {"path": "a"}, "pairs": [("bf16", "bf16"), ("bfloat16", "bf16")]}, "asked for twice"),
        ({"model": {"path": "a"}, "pairs": [("int8", "bf16")]}, "'int8' cannot be used"),
        ({"model": {"path": "a"}, "pairs": [("auto", "bf16")]}, "hides which format runs"),
    ],
)
def test_settings_that_cannot_be_used_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_settings(CompareSettings, values)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.toml", "a = ", "malformed"),
        ("run.yaml", "a: [", "malformed"),
        ("run.json", "{}", "neither .toml nor .yaml"),
        ("run.yaml", "- 1", "top level must be a table"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=words):
        read_settings_file(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml does not exist"):
        read_settings_file(tmp_path / "none.toml")


def test_tables_differ_by_dotted_names() -> None:
    old = {"model": {"path": "a"}, "lora": None, "seed": 1, "engine": {"args": {}}, "gone": {"x": 1}}
    new = {"model": {"path": "b"}, "lora": {"rank": 8}, "seed": 1, "engine": {"args": {"eager": True}}}
    assert list(differences(old, new, "absent")) == [
        ("model.path", "a", "b"),
        ("lora", None, {"rank": 8}),
        ("engine.args.eager", "absent", True),
        ("gone.x", 1, "absent"),
    ]


def test_flat_tables_have_dotted_names_and_keep_what_is_empty() -> None:
    assert dict(flat({"a": {"b": {"c": [1]}, "d": {}}, "e": None})) == {"a.b.c": [1], "a.d": {}, "e": None}
