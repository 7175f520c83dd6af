"""`mismatch-probe schema NAME`, and the schema files that the package ships, one of each JSON document.

`python -m mismatch_probe.cli.schema` makes the files again from the records.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mismatch_probe.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

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
    "evaluation": "evaluate --json, RUN/evaluation.json",
    "headroom": "headroom --json, headroom.json",
    "localize": "localize --json, localize-TRAIN-INFER.json",
    "explain": "explain --json, RUN/explain.json",
    "watch": "watch --json",
}
"""Each document and where it is found."""
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema_path(name: str) -> Path:
    """The schema file of a document."""
    return Path(str(files("mismatch_probe"))) / "schemas" / f"{name}.schema.json"


def schema(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(SCHEMAS)}; all are listed without it.")] = None,
) -> None:
    """Print the JSON schema of a document that --json prints."""
    if name is None:
        for known, where in SCHEMAS.items():
            typer.echo(f"{known:<12}{where}")
    elif name in SCHEMAS:
        typer.echo(schema_path(name).read_text(encoding="utf-8"), nl=False)
    else:
        raise UsageError(f"{name!r} is no document with a schema; give one of {', '.join(SCHEMAS)}")


def documents() -> dict[str, type[BaseModel]]:
    """Each document's record; this loads all of them."""
    from mismatch_probe.compare.estimates import DryRun
    from mismatch_probe.difference.changes import Difference
    from mismatch_probe.gate.reading import NoiseFloor
    from mismatch_probe.records.evaluation import Evaluation
    from mismatch_probe.records.findings import Explanation, Localization
    from mismatch_probe.records.gate_result import GateResult
    from mismatch_probe.records.headroom import Headroom
    from mismatch_probe.records.lines import WatchRecord
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
        "evaluation": Evaluation,
        "headroom": Headroom,
        "localize": Localization,
        "explain": Explanation,
        "watch": WatchRecord,
    }


def schema_of(name: str) -> str:
    """The JSON schema (draft 2020-12) of a document as it is written, of which no field is ever left out."""
    schema = documents()[name].model_json_schema(mode="serialization")
    for title, part in (("", schema), *schema.get("$defs", {}).items()):
        _describe_fields(part, part.get("title", title))
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2, ensure_ascii=False) + "\n"


def _describe_fields(schema: dict[str, Any], title: str) -> None:
    """Give each property the docstring of its field as description, where it has one."""
    for module in [module for name, module in sys.modules.items() if name.startswith("mismatch_probe.")]:
        record = getattr(module, title, None)
        if not isinstance(record, type) or record.__module__ != module.__name__:
            continue
        [body] = [node.body for node in ast.parse(inspect.getsource(record)).body if isinstance(node, ast.ClassDef)]
        for field, text in pairwise(body):
            if not isinstance(text, ast.Expr) or not isinstance(text.value, ast.Constant):
                continue
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            described = schema.get("properties", {}).get(field.target.id)
            if described is not None:
                described.setdefault("description", inspect.cleandoc(str(ast.literal_eval(text.value))))


def write_schemas() -> None:
    """Write every schema file of the package again."""
    from mismatch_probe.records.atomic import write_text

    for name in SCHEMAS:
        write_text(schema_path(name), schema_of(name))


if __name__ == "__main__":
    write_schemas()
