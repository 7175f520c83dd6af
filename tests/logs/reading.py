"""Logs as tests write and read them."""

import json
from pathlib import Path

from mismatch_probe.logs import LogFinding, recognise
from mismatch_probe.records.sequences import LoggedResponse

DATA = Path(__file__).parent / "data"


def read(path: Path, name: str | None = None) -> tuple[list[LoggedResponse], list[LogFinding]]:
    """What a log holds, and what is told as it is read."""
    findings: list[LogFinding] = []
    return list(recognise(path, name).read(path, findings.append)), findings


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
