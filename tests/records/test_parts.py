from pathlib import Path

import pyarrow as pa
import pytest

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.files import TEMPORARY_PREFIX
from mismatch_probe.records.run_directory import Parts


def table(value: int) -> pa.Table:
    return pa.table({"id": [str(value)]})


def test_batches_are_read_in_their_order_however_they_were_written(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "stage", ("leg",))
    parts.open()
    for batch in (2, 0, 1):
        parts.write(batch, {"leg": table(batch)})
    assert parts.read(3, "leg")["id"].to_pylist() == ["0", "1", "2"]


def test_a_batch_with_one_of_its_two_outputs_is_not_done(tmp_path: Path) -> None:
    both = Parts(tmp_path / "stage", ("rollouts", "leg"))
    both.open()
    Parts(tmp_path / "stage", ("rollouts",)).write(0, {"rollouts": table(0)})
    assert not both.is_done(0)
    both.write(0, {"rollouts": table(0), "leg": table(0)})
    assert both.is_done(0)


def test_what_a_killed_writer_left_is_dropped_and_never_read(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "stage", ("leg",))
    parts.open()
    leftover = tmp_path / "stage" / f"{TEMPORARY_PREFIX}000000-leg.parquet"
    leftover.write_bytes(b"half")
    assert not parts.is_done(0)
    parts.write(0, {"leg": table(0)})
    assert not leftover.exists()
    assert parts.read(1, "leg")["id"].to_pylist() == ["0"]


def test_a_missing_batch_is_an_error_not_a_shorter_table(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "stage", ("leg",))
    parts.open()
    parts.write(1, {"leg": table(1)})
    with pytest.raises(BrokenRecord):
        parts.read(2, "leg")
