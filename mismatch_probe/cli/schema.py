"""`mismatch-probe schema NAME`, and the schema files that the package ships, one of each JSON document.

`python -m mismatch_probe.cli.schema` makes the files again from the records.
"""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.json_schema import GenerateJsonSchema
    from pydantic_core import core_schema

SCHEMAS: Final[dict[str, str]] = {
    "summary": "compare --json, report --json, RUN/summary.json",
    "diff": "diff --json",
    "gate": "gate --json, RUN/gate.json",
    "floor": "gate calibrate --json, floor.json",
    "doctor": "doctor --json",
    "dry-run": "compare --dry-run --json",
    "train": "train --json, report --json of a training run",
    "canary": "train --canary --json",
    "sanity": "sanity --json, RUN/sanity.json",
    "ablation": "ablate --json, RUN/ablation.json",
    "ablation-dry-run": "ablate --dry-run --json",
    "evaluation": "evaluate --json, RUN/evaluation.json",
    "headroom": "headroom --json, headroom.json",
    "audit": "audit --json, audit.json",
    "localize": "localize --json, localize-TRAIN-INFER.json",
    "explain": "explain --json, RUN/explain.json",
    "watch": "watch --json",
    "curves": "import --json of metrics alone, RUN/curves.json",
}
"""Each document and where it is found."""
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_NAMES: Final = {"DifferenceSide": "Side", "PrecisionTrial": "Trial"}
"""The names of records in schemas, where these are other than the names of their classes."""


def schema_path(name: str) -> Path:
    """The schema file of a document."""
    from importlib.resources import files

    return Path(str(files("mismatch_probe"))) / "schemas" / f"{name}.schema.json"


def schema(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(SCHEMAS)}; all are listed without it.")] = None,
) -> None:
    """Print the JSON schema of a document that --json prints."""
    if name is None:
        for document, where in SCHEMAS.items():
            typer.echo(f"{document:<18}{where}")
    elif name in SCHEMAS:
        typer.echo(schema_path(name).read_text(encoding="utf-8"), nl=False)
    else:
        raise UsageError(f"{name!r} is no document with a schema; give one of {', '.join(SCHEMAS)}")


def documents() -> dict[str, type[BaseModel]]:
    """Each document's record; this loads all of them."""
    from mismatch_probe.ablate.forecast import AblationForecast
    from mismatch_probe.compare.estimates import DryRun
    from mismatch_probe.records.ablation import AblationResult
    from mismatch_probe.records.answers import Difference, Evaluation, GateResult, NoiseFloor
    from mismatch_probe.records.examinations import Audit, Headroom
    from mismatch_probe.records.findings import Explanation, Localization
    from mismatch_probe.records.lines import CurveReading, WatchRecord
    from mismatch_probe.records.summary import Examination, Summary
    from mismatch_probe.records.training_run import Canary, SanityRecord, TrainingSummary

    return {
        "summary": Summary,
        "diff": Difference,
        "gate": GateResult,
        "floor": NoiseFloor,
        "doctor": Examination,
        "dry-run": DryRun,
        "train": TrainingSummary,
        "canary": Canary,
        "sanity": SanityRecord,
        "ablation": AblationResult,
        "ablation-dry-run": AblationForecast,
        "evaluation": Evaluation,
        "headroom": Headroom,
        "audit": Audit,
        "localize": Localization,
        "explain": Explanation,
        "watch": WatchRecord,
        "curves": CurveReading,
    }


def schema_of(name: str) -> str:
    """The JSON schema (draft 2020-12) of a document as it is written, of which no field is ever left out."""
    schema = documents()[name].model_json_schema(mode="serialization", schema_generator=_generator())
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2, ensure_ascii=False) + "\n"


def _generator() -> type[GenerateJsonSchema]:
    """Describes each property by the docstring below its field."""
    from pydantic.json_schema import GenerateJsonSchema

    class WithDocstrings(GenerateJsonSchema):
        def normalize_name(self, name: str) -> str:
            return _NAMES.get(name, super().normalize_name(name))

        def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
            return _with_descriptions(super().model_schema(schema), schema["cls"])

        def dataclass_schema(self, schema: core_schema.DataclassSchema) -> dict[str, Any]:
            return _with_descriptions(super().dataclass_schema(schema), schema["cls"])

    return WithDocstrings


def _with_descriptions(schema: dict[str, Any], record: type) -> dict[str, Any]:
    if record.__name__ in _NAMES:
        schema["title"] = _NAMES[record.__name__]
    for name, text in _field_docstrings(record).items():
        if name in schema.get("properties", {}):
            schema["properties"][name].setdefault("description", text)
    return schema


def _field_docstrings(record: type) -> dict[str, str]:
    """The text below each field of a class and of its bases."""
    texts = {}
    for base in reversed(record.__mro__):
        if base.__module__.startswith("mismatch_probe."):
            (statement,) = ast.parse(dedent(inspect.getsource(base))).body
            assert isinstance(statement, ast.ClassDef)
            for field, next_statement in pairwise(statement.body):
                if isinstance(field, ast.AnnAssign) and isinstance(next_statement, ast.Expr):
                    texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(next_statement.value).split())
    return texts


def write_schemas() -> None:
    """Write every schema file of the package again."""
    from mismatch_probe.records.files import write_text

    for name in SCHEMAS:
        write_text(schema_path(name), schema_of(name))


if __name__ == "__main__":
    write_schemas()
