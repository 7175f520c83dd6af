"""The schema files of the package: made from the records, and what the commands write agrees with them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from mismatch_probe.cli.schema import SCHEMAS, documents, schema_of, schema_path
from tests.gate.cli import CommandLine, check, gate_file
from tests.simulated_run import Simulation, simulated_run

SAMPLE = Path(__file__).parents[2] / "reports" / "demo" / "summary.json"


def validate(name: str, document: Any) -> None:
    Draft202012Validator(json.loads(schema_path(name).read_text())).validate(document)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_document_has_a_record_and_says_where_it_is_found() -> None:
    assert documents().keys() == SCHEMAS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_shipped_schema_is_the_one_of_the_record(name: str) -> None:
    again = "make them again: python -m mismatch_probe.cli.schema"
    assert schema_path(name).read_text(encoding="utf-8") == schema_of(name), again
    Draft202012Validator.check_schema(json.loads(schema_of(name)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_command_prints_the_shipped_schema(name: str, command_line: CommandLine) -> None:
    ended = command_line("schema", name)
    assert ended.code == 0
    assert ended.stdout == schema_path(name).read_text(encoding="utf-8")


def test_without_a_name_every_document_is_listed(command_line: CommandLine) -> None:
    listed = command_line("schema").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(SCHEMAS)


def test_an_unknown_document_is_a_sentence(command_line: CommandLine) -> None:
    ended = command_line("schema", "sumary")
    assert ended.code == 2
    assert "'sumary' is no document with a schema; give one of summary" in ended.stderr


@pytest.mark.slow
def test_what_the_commands_write_agrees_with_the_schemas(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=32), with_summary=True)
    again = simulated_run(tmp_path / "again", Simulation(num_prompts=32, noise_seed=1))
    limits = '[gate]\nmin_sequences = 32\nmin_prompts = 32\nmax_sequences = 32\nfloor = "floor.json"\n' + check(
        metric="abs_logprob_diff", max_regression=5.0
    )
    gate = gate_file(tmp_path, limits)
    validate("summary", command_line("report", run.path, "--json").document)
    validate("diff", command_line("diff", run.path, again.path, "--json").document)
    validate("floor", command_line("gate", "calibrate", run.path, again.path, "--config", gate, "--json").document)
    validate("floor", read(tmp_path / "floor.json"))
    judged = command_line("gate", run.path, "--config", gate, "--baseline", again.path, "--json")
    assert judged.code == 0
    validate("gate", judged.document)
    validate("gate", read(run.path / "gate.json"))


def test_a_gate_that_decides_nothing_agrees_with_the_schema(tmp_path: Path, command_line: CommandLine) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=4))
    gate = gate_file(tmp_path, "[gate]\n" + check(metric="abs_logprob_diff", max_regression=0.1))
    assert command_line("gate", run.path, "--config", gate).code == 2
    refused = read(run.path / "gate.json")
    assert refused["answer"] == "error"
    validate("gate", refused)


@pytest.mark.slow
def test_the_shipped_sample_agrees_with_the_schema() -> None:
    sample = read(SAMPLE)
    validate("summary", sample)
    assert sample["pairs"]
    assert all(pair["metrics"]["kl_k3"]["low"] is not None for pair in sample["pairs"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("pairs"),
        lambda document: document.update(pears=[]),
        lambda document: document["pairs"][0]["metrics"]["kl_k3"].pop("low"),
        lambda document: document["pairs"][0].update(train_dtype="float16"),
    ],
    ids=["a missing field", "an unknown field", "a number without its interval", "another spelling of a dtype"],
)
def test_a_document_that_is_not_as_written_is_refused(spoil: Any) -> None:
    document = copy.deepcopy(read(SAMPLE))
    spoil(document)
    with pytest.raises(ValidationError):
        validate("summary", document)
