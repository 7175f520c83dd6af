"""The legs of a run. Each file says which leg of which run it is, so that another under its name is found out."""

from pathlib import Path
from typing import Final

import pyarrow as pa

from mismatch_probe.errors import BrokenRecord
from mismatch_probe.records.going_on import go_on
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.records.tables import read_rows, read_table, write_table

_LEG: Final = b"mismatch_probe.leg"
_RUN: Final = b"mismatch_probe.run"


class Legs:
    """`run_key` is that of the run's manifest; empty in a run made before legs said whose they are."""

    def __init__(self, run: RunDirectory, run_key: str) -> None:
        self._run = run
        self._key = run_key

    @property
    def say_whose_they_are(self) -> bool:
        return bool(self._key)

    def path(self, name: str) -> Path:
        return self._run.leg_path(name)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a leg whole or not at all.

        Raises:
            StorageError: the disk refused the write.
        """
        write_table(self.path(name), table.replace_schema_metadata(self._identity(name)))

    def read(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """
        Raises:
            BrokenRecord: the file is missing, cannot be read, or says that it is another leg, or another run's.
        """
        return self._own(name, read_table(self.path(name), columns))

    def read_rows(self, name: str, *schemas: pa.Schema) -> pa.Table:
        """A leg of one of the schemas. Raises as `read`, and as `tables.read_rows`."""
        return self._own(name, read_rows(self.path(name), *schemas))

    def _identity(self, name: str) -> dict[bytes, bytes] | None:
        return {_LEG: name.encode(), _RUN: self._key.encode()} if self._key else None

    def _own(self, name: str, table: pa.Table) -> pa.Table:
        said = {key: value for key, value in (table.schema.metadata or {}).items() if key in (_LEG, _RUN)}
        if said == (self._identity(name) or {}):
            return table
        leg, run = (said.get(key, b"").decode(errors="replace") for key in (_LEG, _RUN))
        if not said:
            what = "does not say which leg of which run it is, as every leg of this run does"
        elif leg != name:
            what = f"is the leg {leg}, not {name}"
        else:
            what = f"is the leg {name} of another run ({run})"
        raise BrokenRecord(
            f"{self.path(name)} {what}: nothing is concluded from it; put the run's own file back, or remove it and "
            f"{go_on(self.path(name))}"
        )
