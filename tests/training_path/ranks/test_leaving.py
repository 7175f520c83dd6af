"""A rank that hangs once everything is computed is waited for so long and no longer, and nothing is lost by it."""

import logging
import time
from pathlib import Path

import pytest

from mismatch_probe.children import start
from mismatch_probe.children.start import Job
from mismatch_probe.config.model import TrainingPathSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from tests.training_path.ranks.jobs import answers_and_hangs, score_over_ranks

pytestmark = pytest.mark.slow

_SECONDS = 2.0
_MUCH_LONGER = 60.0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs in leaving", ""),
        ("hangs before leaving", "1 of the 2 ranks of scoring did not end within 2 s after the first one was done"),
        ("the first hangs in leaving", ""),
    ],
)
def test_a_rank_that_hangs_while_leaving_is_ended_and_all_is_there(
    fault: str,
    words: str,
    llama: Path,
    sequences: list[TokenSequence],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(start, "_LEAVING_SECONDS", _SECONDS)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        scored, _ = score_over_ranks(2, llama, Dtype.FP32, TrainingPathSettings(ranks=2), [sequences], fault=fault)
    assert time.monotonic() - begun < _MUCH_LONGER
    assert len(scored) == len(sequences)
    assert words in caplog.text
    assert bool(caplog.text) == bool(words)


def test_a_job_that_hangs_after_its_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "_ENDING_SECONDS", _SECONDS)
    hanging = Job("scoring", answers_and_hangs, (), "training", "")
    assert start.run(hanging) == "done"
    assert "scoring did not end within 2 s after it was done" in caplog.text
