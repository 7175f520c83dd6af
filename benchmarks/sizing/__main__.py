"""A reference whole and layer by layer at four sizes, and what the same arithmetic says of 7, 70 and 600 billion.

    python -m benchmarks.sizing FOLDER                                # measures what FOLDER/measured.json lacks
    python -m benchmarks.sizing FOLDER --publish reports/sizing.md    # writes the tables

A size is predicted by the cost model of `compare --dry-run` from rates measured a moment before. What it is off by at
the three smaller sizes is taken off the prediction of the fourth, which is then held against what was measured. It ends
with 1 where that is off by more than the interval of `--dry-run` allows.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from benchmarks.sizing.child import BATCH_TOKENS, PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS
from benchmarks.sizing.models import CHECKED, MEASURED, make
from benchmarks.sizing.prediction import Task, predict
from benchmarks.sizing.publish import Measurement, page, worst_of_checked
from mismatch_probe.compare.cost.earlier import FROM_RATES
from mismatch_probe.compare.preflight import count, measure
from mismatch_probe.dtypes import Dtype

TASK = Task(PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS, BATCH_TOKENS)
WAYS = ("whole", "by-layer")


class Taken(BaseModel):
    """What a child says of its way."""

    ready_seconds: float
    load_seconds: float
    score_seconds: float
    peak_bytes: int


def measured_way(name: str, way: str, checkpoint: Path) -> Measurement:
    architecture = count({name: str(checkpoint)}).all()[name]
    calibration = measure(architecture, [("training", Dtype.FP32)], "cpu", str(checkpoint))
    command = [sys.executable, "-m", "benchmarks.sizing.child", str(checkpoint), way]
    taken = Taken.model_validate_json(subprocess.run(command, check=True, capture_output=True).stdout)
    reference = {"by_layer": way == "by-layer"}
    expected = predict(architecture, calibration, TASK, taken.ready_seconds, reference=reference)
    return Measurement(
        size=name,
        way=way,
        parameters=architecture.parameters,
        seconds=taken.load_seconds + taken.score_seconds,
        predicted_seconds=expected.seconds,
        peak_bytes=taken.peak_bytes,
        predicted_bytes=int(expected.peak_bytes),
    )


def measure_all(folder: Path, record: Path) -> None:
    """What the record does not hold yet is measured and added to it."""
    measured = read(record)
    for name, width in {**MEASURED, **CHECKED}.items():
        for way in WAYS:
            if (name, way) not in {(each.size, each.way) for each in measured}:
                measured.append(measured_way(name, way, make(folder / name, width)))
                print(measured[-1], file=sys.stderr, flush=True)
                record.write_text(json.dumps([each.model_dump() for each in measured], indent=1))


def read(record: Path) -> list[Measurement]:
    return TypeAdapter(list[Measurement]).validate_json(record.read_text()) if record.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--publish", type=Path)
    arguments = parser.parse_args()
    record = arguments.folder / "measured.json"
    if arguments.publish is None:
        measure_all(arguments.folder, record)
    measured = read(record)
    if arguments.publish is not None:
        arguments.publish.write_text(page(measured, TASK))
    return int(worst_of_checked(measured) > FROM_RATES)


if __name__ == "__main__":
    sys.exit(main())
