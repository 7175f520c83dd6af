"""What a log's numbers cannot be by the size of its model's vocabulary, once a checkpoint tells it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.importing.scoring import vocabulary_notes
from mismatch_probe.records.tables import read_table
from tests.importing.imported import imported
from tests.importing.logs import rows, write


def notes(tmp_path: Path, written: list[dict[str, Any]], size: int | None) -> set[tuple[str, str | None]]:
    run = imported(tmp_path, write(tmp_path / "log.jsonl", written))
    manifest = run.read_manifest()
    assert manifest.log is not None
    assert "beyond_vocabulary" not in {note.code for note in manifest.log.notes}
    found = vocabulary_notes(run, manifest, read_table(run.rollouts_path), size)
    return {(note.code, note.column) for note in found}


@pytest.mark.slow
def test_entropies_above_that_of_an_even_choice_are_told(tmp_path: Path) -> None:
    written = rows(8, entropy=np.linspace(0.1, 6.0, 30).tolist())
    assert notes(tmp_path, written, 256) == {("beyond_vocabulary", "entropy_nats")}


@pytest.mark.slow
def test_log_probs_of_tokens_that_nobody_drew_are_told(tmp_path: Path) -> None:
    written = rows(60)
    for one in written:
        for column in ("logprobs", "train_logprobs"):
            one[column] = (np.asarray(one[column]) - 6.0).tolist()
    assert notes(tmp_path, written, 256) == {("beyond_vocabulary", "log_mu")}


@pytest.mark.slow
def test_a_vocabulary_that_is_large_enough_or_not_known_tells_nothing(tmp_path: Path) -> None:
    written = rows(60, entropy=np.linspace(0.1, 6.0, 30).tolist())
    assert notes(tmp_path, written, 1024) == set()
    run_with_none = tmp_path / "again"
    run_with_none.mkdir()
    assert notes(run_with_none, written, None) == set()
