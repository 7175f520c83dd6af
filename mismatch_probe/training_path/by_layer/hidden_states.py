"""Hidden states between two layers, of every batch: in memory or on disk, and saved so that a killed run goes on."""

import time
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch

from mismatch_probe.records.atomic import replacing

_MOST_OF_THE_TIME: Final = 0.1
"""Share of the time that saving may take where the states are in memory."""

Hidden = list[torch.Tensor]


class HiddenStates:
    """For each batch the layers it is through, and the hidden states [B, S, D] of its passes behind them.

    A batch is one file, which names the layer and the rows of each pass. Where the states are kept in memory the files
    are written behind a layer, as often as that takes no more than a tenth of the time; otherwise at every layer.
    """

    def __init__(self, folder: Path, *, in_memory: bool) -> None:
        self.in_memory = in_memory
        self._folder = folder
        self._layers: dict[int, int] = {}
        self._held: dict[int, Hidden] = {}
        self._passes: dict[int, list[list[int]]] = {}
        self._saved_at = time.monotonic()
        self._saving_seconds = 0.0

    def open(self, batch: int, passes: Sequence[Sequence[int]]) -> int:
        """How many layers a batch is through; none where it was last computed in other passes."""
        self._passes[batch] = [list(rows) for rows in passes]
        saved = self._read(batch)
        self._layers[batch] = 0 if saved is None else saved["layers"]
        if saved is not None and self.in_memory:
            self._held[batch] = saved["hidden"]
        return self._layers[batch]

    def layers(self, batch: int) -> int:
        return self._layers[batch]

    def get(self, batch: int) -> Sequence[torch.Tensor | None]:
        """Of each pass; None before the first layer."""
        if not self._layers[batch]:
            return [None] * len(self._passes[batch])
        if self.in_memory:
            return self._held[batch]
        saved = self._read(batch)
        assert saved is not None, "nobody else removes it"
        hidden: Hidden = saved["hidden"]
        return hidden

    def put(self, batch: int, layers: int, hidden: Hidden) -> None:
        """
        Raises:
            StorageError: the disk refused.
        """
        self._layers[batch] = layers
        if self.in_memory:
            self._held[batch] = hidden
        else:
            self._write(batch, hidden)

    def end_layer(self) -> None:
        """Save what is in memory, unless that was done a moment ago.

        Raises:
            StorageError: the disk refused.
        """
        before = time.monotonic()
        if before - self._saved_at < self._saving_seconds / _MOST_OF_THE_TIME:
            return
        for batch, hidden in self._held.items():
            self._write(batch, hidden)
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - before

    def forget(self, batch: int) -> None:
        """A batch whose scores are recorded."""
        self._held.pop(batch, None)
        self._path(batch).unlink(missing_ok=True)

    def _write(self, batch: int, hidden: Hidden) -> None:
        state = {"layers": self._layers[batch], "passes": self._passes[batch], "hidden": hidden}
        with replacing(self._path(batch)) as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # PyTorch's own words about a write that the system refused
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def _read(self, batch: int) -> dict[str, Any] | None:
        """None where there is no file, or a damaged one or one of other passes: the batch is then computed anew."""
        try:
            saved: dict[str, Any] = torch.load(self._path(batch), weights_only=True)
        except (FileNotFoundError, RuntimeError, EOFError, UnpicklingError):
            return None
        return saved if saved["passes"] == self._passes[batch] else None

    def _path(self, batch: int) -> Path:
        return self._folder / f"{batch:06d}-hidden.pt"
