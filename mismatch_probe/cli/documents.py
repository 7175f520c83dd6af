"""The JSON documents that the commands print and write, and the schema file shipped for each.

`python -m mismatch_probe.cli.documents` makes the files from the records, and `mismatch-probe schema` prints them.
"""

import json
from typing import Final

from pydantic import BaseModel

from mismatch_probe.cli.schema import SCHEMAS, schema_path
from mismatch_probe.compare.estimates import DryRun
from mismatch_probe.difference.changes import Difference
from mismatch_probe.gate.reading import Floor
from mismatch_probe.records.atomic import write_text
from mismatch_probe.records.evaluation import Evaluation
from mismatch_probe.records.findings import Explanation, Localization
from mismatch_probe.records.gate_result import GateResult
from mismatch_probe.records.headroom import Headroom
from mismatch_probe.records.lines import WatchRecord
from mismatch_probe.records.summary import Examination, Summary
from mismatch_probe.records.training_run import Canary, SanityRecord, TrainingSummary

RECORDS: Final[dict[str, type[BaseModel]]] = {
    "summary": Summary,
    "diff": Difference,
    "gate": GateResult,
    "floor": Floor,
    "doctor": Examination,
    "dry-run": DryRun,
    "train": TrainingSummary,
    "canary": Canary,
    "sanity": SanityRecord,
    "evaluation": Evaluation,
    "headroom": Headroom,
    "localize": Localization,
    "explain": Explanation,
    "watch": WatchRecord,
}

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(name: str) -> str:
    """The JSON schema (draft 2020-12) of a document as it is written, of which no field is ever left out."""
    schema = RECORDS[name].model_json_schema(mode="serialization")
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2, ensure_ascii=False) + "\n"


def write_schemas() -> None:
    """Write every schema file of the package again."""
    for name in SCHEMAS:
        write_text(schema_path(name), schema_of(name))


if __name__ == "__main__":
    write_schemas()
