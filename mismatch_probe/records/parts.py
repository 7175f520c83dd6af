"""Resumable work: a stage is a fixed list of batches, and each finished batch is one part file."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from mismatch_probe.records.atomic import storage_errors
from mismatch_probe.records.tables import read_table, write_table


class Parts:
    """The part files of one stage, under `RUN/parts/STAGE/`, named by batch number and output."""

    def __init__(self, folder: Path, outputs: Sequence[str]) -> None:
        self._folder = folder
        self._outputs = tuple(outputs)

    def open(self) -> None:
        """Make the folder."""
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def beside(self, name: str) -> Path:
        """A folder for what a stage keeps until its last batch is done; it is removed with the parts."""
        return self._folder / name

    def is_done(self, batch: int) -> bool:
        return all(self._path(batch, output).exists() for output in self._outputs)

    def write(self, batch: int, tables: dict[str, pa.Table]) -> None:
        """Record one finished batch.

        Raises:
            StorageError: the disk refused the write.
        """
        for output in self._outputs:
            write_table(self._path(batch, output), tables[output])

    def read(self, num_batches: int, output: str) -> pa.Table:
        """All batches of one output, in batch order.

        Raises:
            BrokenRecord: a part is missing or damaged.
        """
        return pa.concat_tables([read_table(self._path(batch, output)) for batch in range(num_batches)])

    def remove(self) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder)
            if not any(self._folder.parent.iterdir()):
                self._folder.parent.rmdir()

    def _path(self, batch: int, output: str) -> Path:
        return self._folder / f"{batch:06d}-{output}.parquet"
