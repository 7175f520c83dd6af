"""`mismatch-probe schema NAME`."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import typer

from mismatch_probe.errors import UsageError

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
