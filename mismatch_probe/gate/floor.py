"""The noise floor on file: what an unchanged set-up shows of itself, so that no limit is put below it."""

from pathlib import Path

from mismatch_probe.difference.samples import pair_text
from mismatch_probe.errors import UsageError
from mismatch_probe.gate.config import Check, GateFile
from mismatch_probe.gate.metric_names import has_regression
from mismatch_probe.gate.reading import OpenRun
from mismatch_probe.records.documents import read_document, write_document
from mismatch_probe.records.summary import Record


class FloorEntry(Record):
    """The floor of one measured thing of one pair; None where it was not measured.

    same_leg: its largest value between the same leg computed twice on the same ids, within a run or in two. change: the
    largest relative change between repeated runs, its bound included.
    """

    pair: str
    measured: str
    same_leg: float | None
    change: float | None

    @property
    def is_measured(self) -> bool:
        return self.same_leg is not None or self.change is not None


class Floor(Record):
    """`floor.json`: made by `gate calibrate` from runs of one set-up, read by `gate`."""

    schema_version: int = 1
    model_fingerprint: str
    runs: list[str]
    num_sequences: int
    entries: list[FloorEntry]


def write_floor(path: Path, floor: Floor) -> None:
    write_document(path, floor)


def read_floor(path: Path) -> Floor:
    """The measured floor.

    Raises:
        RunDirectoryError: the file is not there.
        BrokenRecord: it cannot be read.
    """
    return read_document(
        path,
        Floor,
        missing="the gate file names it as floor; make it with gate calibrate, or take floor out",
        mend="make it again with gate calibrate",
    )


def check_above_floor(gate: GateFile, floor: Floor, run: OpenRun) -> None:
    """No limit asks for less than an unchanged set-up shows.

    Raises:
        UsageError: one does, or the floor was measured on another model or without this check.
    """
    if floor.model_fingerprint != run.manifest.model.fingerprint:
        raise UsageError("the floor was measured on another model; measure it again with gate calibrate")
    known = {(entry.pair, entry.measured): entry for entry in floor.entries}
    for check in checks_with_floor(gate):
        for name in [check.slice.pair] if check.slice.pair else run.samples:
            entry = known.get((pair_text(name), check.measured))
            if entry is None:
                raise UsageError(
                    f"the floor of {check.measured} was never measured for {pair_text(name)}; calibrate again"
                )
            least = entry.change if check.kind == "max_regression" else entry.same_leg
            if least is None and check.kind == "max_regression":
                raise UsageError(
                    f"the floor of {check} was measured from one run, which shows no change; give gate calibrate two"
                )
            if least is not None and not _is_above(check, least):
                raise UsageError(
                    f"the check {check} on {entry.pair} is below the noise floor: an unchanged set-up shows "
                    f"{least:.3g}; move the limit past that, or calibrate with more sequences"
                )


def _is_above(check: Check, least: float) -> bool:
    return check.limit > least if check.upper else check.limit < least


def checks_with_floor(gate: GateFile) -> list[Check]:
    """The checks whose metric is positive by nature and judged with an interval."""
    return [check for check in gate.checks if check.is_statistical and has_regression(check.name)]
