"""Rows of bad input: run directories whose files are damaged, or are others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.cli.bad_rows import BROKEN, Bad, Change, Content, as_folder, as_pipe, cut, edited, removed, written
from tests.report.training.training_runs import firing

_DEEP = "[" * 100_000
_DIGITS = "9" * 5000
_LEG = "legs/train-bf16.parquet"
_ROLLOUTS = "rollouts.parquet"


def _table(name: str, change: Callable[[pa.Table], pa.Table]) -> Change:
    def edit(folder: Path) -> None:
        pq.write_table(change(pq.read_table(folder / name)), folder / name)

    return edit


def _column(name: str, column: str, kind: pa.DataType, change: Callable[[list[Any]], list[Any]]) -> Change:
    def edit(table: pa.Table) -> pa.Table:
        values = pa.array(change(table[column].to_pylist()), kind)
        return table.set_column(table.schema.get_field_index(column), pa.field(column, kind), values)

    return _table(name, edit)


def _twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table])


_MANIFESTS: list[tuple[str, Change, str]] = [
    ("of null", written("manifest.json", "null"), "it holds null, not an object"),
    ("of a list", written("manifest.json", "[]"), "it holds a list, not an object"),
    ("of nothing", written("manifest.json", "{}"), "it has no version"),
    ("empty", written("manifest.json", ""), "malformed JSON"),
    ("deep", written("manifest.json", _DEEP), "it nests deeper than can be read"),
    ("not UTF-8", written("manifest.json", b"\xff\xfe\x00"), "not UTF-8"),
    ("of NaN", written("manifest.json", '{"manifest_version": NaN}'), "it holds NaN"),
    ("of many digits", written("manifest.json", f'{{"manifest_version": {_DIGITS}}}'), "more digits than can be read"),
    ("with a key twice", written("manifest.json", '{"a": 1, "a": 1}'), "it names the key 'a' twice"),
    ("of a later version", edited("manifest.json", lambda one: one.update(manifest_version=99)), "manifest version 99"),
    ("of version true", edited("manifest.json", lambda one: one.update(manifest_version=True)), "version true"),
    ("without a model", edited("manifest.json", lambda one: one.pop("model")), "model: Field required"),
    ("with another key", edited("manifest.json", lambda one: one.update(wish=1)), "wish: Extra inputs"),
    ("without stages", edited("manifest.json", lambda one: one.update(stages=None)), "stages: Input should be"),
    ("without pairs", edited("manifest.json", lambda one: one["settings"].update(pairs=[])), "no dtype to compare"),
    ("a folder", as_folder("manifest.json"), "it is a folder"),
    ("a pipe", as_pipe("manifest.json"), "manifest.json is a pipe"),
]
_SUMMARIES: list[tuple[str, Change, str]] = [
    ("of null", written("summary.json", "null"), "it holds null, not an object"),
    ("of nothing", written("summary.json", "{}"), "schema version null"),
    ("of a later version", edited("summary.json", lambda one: one.update(schema_version=99)), "schema version 99"),
    ("of a version as text", edited("summary.json", lambda one: one.update(schema_version="1")), 'version "1"'),
    ("without pairs", edited("summary.json", lambda one: one.update(pairs=3)), "pairs: Input should be"),
    ("deep", written("summary.json", _DEEP), "it nests deeper than can be read"),
    ("cut off", cut("summary.json"), "malformed JSON"),
    ("a folder", as_folder("summary.json"), "it is a folder"),
]
_TABLES: list[tuple[str, Change, str]] = [
    ("no rollouts", removed(_ROLLOUTS), "is missing: the run is unfinished"),
    ("empty rollouts", written(_ROLLOUTS, b""), "it is truncated or not parquet"),
    ("rollouts cut off", cut(_ROLLOUTS), "it is truncated or not parquet"),
    ("rollouts are a folder", as_folder(_ROLLOUTS), "rollouts.parquet"),
    ("rollouts twice", _table(_ROLLOUTS, _twice), "has several rows of one response"),
    ("no token ids", _table(_ROLLOUTS, lambda table: table.drop_columns(["token_ids"])), "does not hold the columns"),
    (
        "token ids of text",
        _column(_ROLLOUTS, "token_ids", pa.list_(pa.string()), lambda rows: [["a"]] * len(rows)),
        "does not hold the columns",
    ),
    ("ids that are numbers", _column(_ROLLOUTS, "id", pa.int64(), lambda rows: list(range(len(rows)))), "the columns"),
    ("no leg", removed(_LEG), "is missing: the run is unfinished"),
    ("empty leg", written(_LEG, b""), "it is truncated or not parquet"),
    ("leg cut off", cut(_LEG), "it is truncated or not parquet"),
    ("leg is a folder", as_folder(_LEG), "train-bf16.parquet"),
    ("leg with a row less", _table(_LEG, lambda table: table.slice(1)), "has no row for response"),
    ("leg twice", _table(_LEG, _twice), "has several rows of one response"),
    (
        "log-probs of text",
        _column(_LEG, "logprobs", pa.list_(pa.string()), lambda rows: [["a"]] * len(rows)),
        "does not hold the columns",
    ),
    (
        "fewer most likely tokens than log-probs",
        _column(_LEG, "top1_ids", pa.list_(pa.int32()), lambda rows: [[1]] * len(rows)),
        "another number of top1_ids",
    ),
    (
        "fewer entropies than log-probs",
        _column(_LEG, "entropy_nats", pa.list_(pa.float32()), lambda rows: [[1.0]] * len(rows)),
        "another number of entropy_nats",
    ),
]

_LINE = '{"step": 5, "loss": %s, "nonfinite": %s}'
_METRICS: list[tuple[Content, str]] = [
    ("null", "it holds null, not an object"),
    ("[]", "it holds a list, not an object"),
    ("{", "malformed JSON"),
    ("{}", "step: Field required"),
    ('{"step": 5}', "nonfinite: Field required"),
    ('{"step": null, "nonfinite": {}}', "step: Input should be"),
    ('{"step": true, "nonfinite": {}}', "step: Input should be"),
    ('{"step": -1, "nonfinite": {}}', "step: Input should be"),
    ('{"step": 5, "step": 6, "nonfinite": {}}', "it names the key 'step' twice"),
    (_LINE % ('"x"', "{}"), "loss: Input should be"),
    (_LINE % ("true", "{}"), "loss: Input should be"),
    (_LINE % ("null", "{}"), "loss is null"),
    (_LINE % ("null", '{"loss": "much"}'), "nonfinite.loss: Input should be"),
    (_LINE % ("NaN", "{}"), "it holds NaN"),
    (_LINE % ("1e999", "{}"), "it holds '1e999'"),
    (_LINE % (_DIGITS, "{}"), "more digits than can be read"),
    (_DEEP, "it nests deeper than can be read"),
    (b"\xff", "not UTF-8"),
]
_EVENTS: list[tuple[Content, str]] = [
    ("null", "it holds null, not an object"),
    ("{}", "step: Field required"),
    (json.dumps(firing(3, ["warn"], value="much")), "value"),
    (json.dumps(firing(3, ["warn"], guard=3)), "guard: Input should be"),
    (json.dumps(firing(3, ["warn"], sentence=None)), "sentence: Input should be"),
    (json.dumps(firing(3, ["warn"]) | {"actions": 3}), "actions: Input should be"),
]
_TRAININGS: list[tuple[str, Change, str]] = [
    ("manifest of null", written("manifest.json", "null"), "it holds null, not an object"),
    ("later version", edited("manifest.json", lambda one: one.update(training_version=99)), "training version 99"),
    ("no settings", edited("manifest.json", lambda one: one.pop("settings")), "settings: Field required"),
    ("outcome of 3", edited("manifest.json", lambda one: one.update(outcome=3)), "outcome: Input should be"),
    ("metrics are a folder", as_folder("metrics.jsonl"), "it is a folder"),
    ("metrics are a pipe", as_pipe("metrics.jsonl"), "metrics.jsonl is a pipe"),
]
_FINDINGS: list[tuple[str, str, Content, str]] = [
    ("headroom", "headroom.json", "null", "it holds null, not an object"),
    ("headroom", "headroom.json", '{"schema_version": 99}', "schema version 99"),
    ("headroom", "headroom.json", _DEEP, "it nests deeper than can be read"),
    ("localize", "localize-bf16-bf16.json", "null", "it holds null, not an object"),
    ("localize", "localize-bf16-bf16.json", "{}", "schema version null"),
    ("localize", "localize-bf16-bf16.json", _DEEP, "it nests deeper than can be read"),
]


def _appended(name: str, line: Content) -> Change:
    def append(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write((line.encode() if isinstance(line, str) else line) + b"\n")

    return append


ROWS = [
    *(
        Bad(command, words, BROKEN, of="run", change=change, name=f"manifest {name}")
        for command in (
            "gate {changed} --config {gate}",
            "report {changed} --recompute",
            "compare --resume --out {changed}",
        )
        for name, change, words in _MANIFESTS
    ),
    *(
        Bad("report {changed}", words, BROKEN, of="run", change=change, name=f"summary {name}")
        for name, change, words in _SUMMARIES
    ),
    *(
        Bad(command, words, BROKEN, of="run", change=change, name=name)
        for command in ("gate {changed} --config {gate}", "diff {changed} {run}")
        for name, change, words in _TABLES
    ),
    *(
        Bad("report {changed}", words, BROKEN, of="training", change=_appended(file, line), name=repr(line)[:50])
        for file, lines in (("metrics.jsonl", _METRICS), ("events.jsonl", _EVENTS))
        for line, words in lines
    ),
    *(
        Bad("report {changed}", words, BROKEN, of="training", change=change, name=name)
        for name, change, words in _TRAININGS
    ),
    *(
        Bad("report {changed}", words, BROKEN, of=place, change=written(name, content), name=repr(content)[:50])
        for place, name, content, words in _FINDINGS
    ),
    Bad(
        "evaluate --resume --out {changed}",
        "it holds null, not an object",
        BROKEN,
        of="evaluation",
        change=written("evaluation.json", "null"),
    ),
    Bad(
        "sanity --resume --out {changed}",
        "it holds null, not an object",
        BROKEN,
        of="sanity",
        change=written("sanity.json", "null"),
    ),
]
