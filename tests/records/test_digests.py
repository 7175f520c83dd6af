"""What was edited after it was written is broken data, and named; what has no digests is read as before."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_probe.compare.derived_runs import extend_run
from mismatch_probe.compare.preparation import Preparation
from mismatch_probe.compare.run import resume_run
from mismatch_probe.errors import BrokenRecord, ExitCode
from mismatch_probe.reading import read_text
from mismatch_probe.records.digests import manifest_digest, new_run_key, seal, with_digests
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import ROLLOUTS, prompts_of, read_table, write_table
from tests.gate.cli import GATE, GOOD, CommandLine, gate_file
from tests.simulated_run import Simulation, simulated_run

KEY = new_run_key()
SIMULATION = Simulation(num_prompts=32, mean_length=20, run_key=KEY)
LABEL = b"mismatch_probe.leg"


@pytest.fixture
def command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return simulated_run(tmp_path / "run", SIMULATION, with_summary=True)


def in_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[RunDirectory], Path]:
    def edit(run: RunDirectory) -> Path:
        manifest = json.loads(run.manifest_path.read_text())
        change(manifest)
        run.manifest_path.write_text(json.dumps(manifest, indent=2))
        return run.manifest_path

    return edit


def colder(manifest: dict[str, Any]) -> None:
    manifest["settings"]["sampling"]["temperature"] = 0.5


def other_model(manifest: dict[str, Any]) -> None:
    manifest["model"]["fingerprint"] = "checkpoint-b"


def other_weights(manifest: dict[str, Any]) -> None:
    weights = {"num_tensors": 2, "num_other": 1}
    manifest["checkpoint_differences"] = [{"train": "a", "infer": "b", "weights": weights}]


def without_digest(manifest: dict[str, Any]) -> None:
    del manifest["digest"]
    colder(manifest)


def as_made_before(manifest: dict[str, Any]) -> None:
    manifest["run_key"] = manifest["digest"] = ""


def other_label(run: RunDirectory) -> Path:
    """The engine's leg under the training side's name, and saying so."""
    leg = pq.read_table(run.leg_path("infer-bf16-decode"))
    metadata = {**leg.schema.metadata, LABEL: b"train-bf16"}
    pq.write_table(leg.replace_schema_metadata(metadata), run.leg_path("train-bf16"))
    return run.leg_path("train-bf16")


def other_label_alone(run: RunDirectory) -> Path:
    """The same without any digests."""
    leg = pq.read_table(run.leg_path("infer-bf16-decode"))
    metadata = {LABEL: b"train-bf16", b"mismatch_probe.run": KEY.encode()}
    pq.write_table(leg.replace_schema_metadata(metadata), run.leg_path("train-bf16"))
    return run.leg_path("train-bf16")


def other_numbers(run: RunDirectory) -> Path:
    path = run.leg_path("train-bf16")
    leg = pq.read_table(path)
    columns = leg.to_pydict()
    columns["logprobs"][3][2] -= 1e-6
    pq.write_table(pa.table(columns, schema=leg.schema), path)
    return path


def other_reason(run: RunDirectory) -> Path:
    rollouts = pq.read_table(run.rollouts_path)
    columns = rollouts.to_pydict()
    columns["finish_reason"][0] = "lenght"
    pq.write_table(pa.table(columns, schema=rollouts.schema), run.rollouts_path)
    return run.rollouts_path


def other_prompt(run: RunDirectory) -> Path:
    prompts = pq.read_table(run.prompts_path)
    columns = prompts.to_pydict()
    columns["text"][0] += "?"
    pq.write_table(pa.table(columns, schema=prompts.schema), run.prompts_path)
    return run.prompts_path


def prompts_without_digests(run: RunDirectory) -> Path:
    pq.write_table(pq.read_table(run.prompts_path).replace_schema_metadata(None).slice(1), run.prompts_path)
    return run.prompts_path


def prompts_of_another_run(run: RunDirectory) -> Path:
    other = simulated_run(run.path.parent / "another", replace(SIMULATION, run_key=new_run_key()))
    shutil.copy(other.prompts_path, run.prompts_path)
    return run.prompts_path


def rollouts_without_digests(run: RunDirectory) -> Path:
    pq.write_table(pq.read_table(run.rollouts_path).replace_schema_metadata(None), run.rollouts_path)
    return run.rollouts_path


EDITS = [
    *map(in_manifest, (colder, other_model, other_weights, without_digest)),
    *(other_label, other_label_alone, other_numbers, other_reason, rollouts_without_digests),
    *(other_prompt, prompts_without_digests, prompts_of_another_run),
]
NAMES = [
    *("temperature", "model", "weights", "no digest", "label", "label alone", "numbers", "reason", "no digests"),
    *("prompt", "prompts without digests", "other prompts"),
]


@pytest.mark.slow
def test_a_run_that_nobody_edited_is_judged_and_drawn(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine
) -> None:
    words = ("gate", run.path, "--config", gate_file(tmp_path, GATE + GOOD))
    assert command_line(*words).code == ExitCode.PASS
    assert command_line("report", run.path, "--recompute").code == ExitCode.PASS


def test_a_manifest_that_is_replaced_while_it_is_read_was_not_edited(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on replaces it at each batch, whoever reads it meanwhile."""
    manifest = run.read_manifest()
    next_manifest = manifest.model_copy(update={"left_out": {"fp16": "the engine refuses it"}})

    def read_and_replace(path: Path) -> str:
        text = read_text(path)
        run.write_manifest(next_manifest)
        return text

    monkeypatch.setattr("mismatch_probe.records.manifest.read_text", read_and_replace)
    assert run.read_manifest().left_out == {}
    assert run.read_manifest().left_out == next_manifest.left_out


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS, ids=NAMES)
def test_an_edited_file_is_broken_data_to_the_gate_and_the_report(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine, edit: Callable[[RunDirectory], Path]
) -> None:
    words = ("gate", run.path, "--config", gate_file(tmp_path, GATE + GOOD))
    path = edit(run)
    for command in (words, ("report", run.path, "--recompute"), ("diff", run.path, run.path)):
        ended = command_line(*command)
        assert (ended.code, str(path) in ended.stderr) == (ExitCode.ENVIRONMENT, True), (command, ended.stderr)
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("edit", EDITS[:4], ids=NAMES[:4])
def test_an_edited_manifest_does_not_go_on(
    run: RunDirectory, command_line: CommandLine, edit: Callable[[RunDirectory], Path]
) -> None:
    edit(run)
    ended = command_line("compare", "--resume", "--out", run.path)
    assert (ended.code, f"{run.manifest_path} was edited" in ended.stderr) == (ExitCode.ENVIRONMENT, True)


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS[-3:], ids=NAMES[-3:])
def test_edited_prompts_do_not_go_on(run: RunDirectory, edit: Callable[[RunDirectory], Path]) -> None:
    manifest = run.read_manifest()
    preparation = Preparation(manifest, prompts_of(pq.read_table(run.prompts_path)))
    resume_run(run.path, preparation)
    path = edit(run)
    before = path.read_bytes()
    for go_on in (lambda: resume_run(run.path, preparation), lambda: extend_run(run, preparation, print)):
        with pytest.raises(BrokenRecord, match=re.escape(str(path))):
            go_on()
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "0123456789abcdef", "sealed-0123456789abcdef"])
def test_a_run_made_before_prompts_had_digests_is_read_and_goes_on(
    tmp_path: Path, command_line: CommandLine, key: str
) -> None:
    old = simulated_run(tmp_path / "old", replace(SIMULATION, run_key=key), with_summary=True)
    assert b"mismatch_probe.digests" not in (pq.read_schema(old.prompts_path).metadata or {})
    prompts = pq.read_table(old.prompts_path)
    assert command_line("gate", old.path, "--config", gate_file(tmp_path, GATE + GOOD)).code == ExitCode.PASS
    assert command_line("report", old.path, "--recompute").code == ExitCode.PASS
    resume_run(old.path, Preparation(old.read_manifest(), prompts_of(prompts)))
    assert pq.read_table(old.prompts_path).equals(prompts)


def test_a_run_that_is_made_to_look_older_than_its_legs_is_broken(
    run: RunDirectory, tmp_path: Path, command_line: CommandLine
) -> None:
    in_manifest(as_made_before)(run)
    ended = command_line("gate", run.path, "--config", gate_file(tmp_path, GATE + GOOD))
    assert ended.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("key", ["", "0123456789abcdef"])
def test_a_run_without_digests_is_read_and_written_as_before(
    tmp_path: Path, command_line: CommandLine, key: str
) -> None:
    old = simulated_run(tmp_path / "old", Simulation(num_prompts=32, mean_length=20, run_key=key))
    in_manifest(colder)(old)
    assert old.read_manifest().settings.sampling.temperature == 0.5
    assert b"mismatch_probe.digests" not in (pq.read_schema(old.leg_path("train-bf16")).metadata or {})
    old.write_manifest(old.read_manifest())
    assert not old.read_manifest().digest


def test_what_says_when_and_where_a_run_was_made_is_not_in_its_digest(run: RunDirectory) -> None:
    """Nor what a later version adds."""
    content = json.loads(run.manifest_path.read_text())
    assert manifest_digest({**content, "hardware": {"x": 1}, "later": 5}) == content["digest"]


TABLE = pa.table(
    {
        "id": pa.array(["a", "é", "c", "", "e"]),
        "texts": pa.array([["x", ""], None, [], ["yy", None], ["z"]], type=pa.list_(pa.string())),
        "numbers": pa.array([[1.0, None], [], [float("nan")], None, [2.0]], type=pa.list_(pa.float32())),
        "flags": pa.array([True, None, False, True, False]),
        "nested": pa.array([[[1], [2, 3]], [], [[]], [[4]], None], type=pa.list_(pa.list_(pa.int32()))),
    }
)


def test_how_a_table_is_cut_does_not_change_its_digests(tmp_path: Path) -> None:
    complete_table = with_digests(seal(TABLE, {}))
    for cut in ([0, 2, 5], [0, 1, 2, 3, 4, 5], [0, 0, 5]):
        parts = pa.concat_tables([TABLE.slice(start, end - start) for start, end in pairwise(cut)])
        assert with_digests(seal(parts, {})).schema.metadata == complete_table.schema.metadata
    write_table(tmp_path / "t.parquet", seal(TABLE, {b"mine": b"1"}))
    assert read_table(tmp_path / "t.parquet", ["id", "numbers"]).num_rows == 5


def test_every_change_of_a_table_changes_the_digest_of_its_column(tmp_path: Path) -> None:
    others = {
        "id": ["a", "éc", "", "", "e"],
        "texts": [["x"], None, [""], ["yy", None], ["z"]],
        "numbers": [[1.0], [None], [float("nan")], None, [2.0]],
        "flags": [True, False, None, True, False],
        "nested": [[[1, 2], [3]], [], [[]], [[4]], None],
    }
    path = tmp_path / "t.parquet"
    for name, values in others.items():
        write_table(path, seal(TABLE, {}))
        table = pq.read_table(path)
        place = table.schema.get_field_index(name)
        changed = table.set_column(place, table.field(place), pa.array(values, type=table.field(place).type))
        pq.write_table(changed, path)
        with pytest.raises(BrokenRecord, match="was edited: its digests are not those of its rows"):
            read_table(path)
        read_table(path, [other for other in TABLE.column_names if other != name])


def test_an_empty_table_has_digests(tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", seal(ROLLOUTS.empty_table(), {}))
    assert read_table(tmp_path / "t.parquet").num_rows == 0


@pytest.mark.parametrize("digests", [b"", b"{", b"[]", b"{}", b'{"id": 5}', b"\xff"])
def test_digests_that_are_none_are_no_traceback(tmp_path: Path, digests: bytes) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE.replace_schema_metadata({b"mismatch_probe.digests": digests}), path)
    with pytest.raises(BrokenRecord, match="was edited"):
        read_table(path)
