"""`docs/logs.md` names every format, every code and every column, and no other."""

import json
import re
from pathlib import Path

import pytest

from mismatch_probe.logs import FORMATS, Holds, LogCode
from mismatch_probe.logs.formats import plain

DOCUMENT = (Path(__file__).parents[2] / "docs" / "logs.md").read_text()


def named(heading: str) -> list[str]:
    """What the first column of the table under a heading names."""
    section = DOCUMENT.split(f"## {heading}")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_every_format_is_documented():
    mentioned = {"miles_train"}
    assert set(named("Which trainer writes what")) - {"format"} | mentioned == FORMATS.built_in.keys()
    assert "`miles_train`" in DOCUMENT
    assert all(known.why_not for known in FORMATS.built_in.values() if known.holds in (Holds.PROMPTS, Holds.NOTHING))


def test_every_code_is_documented():
    assert named("What is checked") == list(LogCode)


def test_every_column_is_documented():
    assert set(named("The plain format")) == {*plain.NEEDED, *plain.OPTIONAL}


def test_the_example_is_read(tmp_path):
    [example] = re.findall(r"```json\n(.+?)\n```", DOCUMENT)
    (tmp_path / "a.jsonl").write_text(example)
    [response] = FORMATS.built_in["plain"].read(tmp_path / "a.jsonl", pytest.fail)
    assert response.token_ids.tolist() == json.loads(example)["token_ids"]
