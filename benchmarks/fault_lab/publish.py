"""The lab's report: a table a person reads, and the outcomes as JSON."""

import json
from collections import Counter
from pathlib import Path

from benchmarks.fault_lab.scoring import CleanOutcome, Outcome, as_json


def publish(outcomes: list[Outcome], clean: list[CleanOutcome], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"clean": as_json(clean), "faults": as_json(outcomes)}
    (folder / "fault-lab.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "fault-lab.md").write_text("\n".join(Counter()), encoding="utf-8")
