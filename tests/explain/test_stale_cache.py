"""A prefix cache that was kept across a change of weights."""

from pathlib import Path

import pytest

from benchmarks.fault_lab.in_training import other_weights
from benchmarks.log_faults.stale_cache import behind_cache
from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.sequences import TokenSequence
from tests.explain.conftest import ExplainedLog
from tests.explain.logs import logged, scored


@pytest.fixture(scope="module")
def older(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(llama, tmp_path_factory.mktemp("older") / "weights", 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 16])
def test_a_cache_of_older_weights_is_told_from_older_weights(
    llama: Path,
    older: Path,
    responses: list[TokenSequence],
    explained_log: ExplainedLog,
    block: int,
    rows_tried: set[int],
) -> None:
    """A cache that was kept within responses is tried on a few of them, which speak against it."""
    log = logged(responses, mu=behind_cache(older, llama, responses, block, Dtype.BF16), pi=scored(llama, responses))
    explanation = explained_log(log, weights=({"version": "step 7", "checkpoint": str(older)},))
    mu, pi = explanation.sides
    assert pi.verdict.code == "as_declared"
    assert mu.verdict.code == "stale_weights"
    assert "the prompt's key-value cache left by the weights of step 7" in mu.verdict.sentence
    assert 0 < len(rows_tried) < len(responses)
