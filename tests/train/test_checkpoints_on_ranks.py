"""What some ranks wrote, another number of ranks reads: weights, tied ones too, and moments of policy and critic."""

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT
from tests.warm_python import warm_python, warm_ranks

pytestmark = pytest.mark.slow


def program(what: str, folder: Path, output: Path) -> tuple[str, ...]:
    return ("tests.train.checkpoint_on_ranks", what, str(DEMO_CHECKPOINT), str(folder), str(output))


def on_ranks(ranks: int, what: str, folder: Path) -> dict[str, Any]:
    output = folder.parent / f"{what}-{ranks}.json"
    warm_ranks(ranks, *program(what, folder, output))
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_what_some_ranks_wrote_others_read(tmp_path: Path, writers: int, readers: int) -> None:
    written = on_ranks(writers, "write", tmp_path / "checkpoints")
    assert on_ranks(readers, "read", tmp_path / "checkpoints") == written
    assert any(name.endswith("exp_avg_sq") and sums[0] > 0 for name, sums in written.items())
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".metadata", ".distcp", ".pt", ".bin")]


def test_a_rank_whose_share_is_gone_is_missed(tmp_path: Path) -> None:
    on_ranks(2, "write", tmp_path / "checkpoints")
    state = tmp_path / "checkpoints" / "step-000001" / "state"
    first, last = sorted(state.iterdir())
    for share in (first, last):
        content = share.read_bytes()
        share.unlink()
        refused = warm_python(*program("read", tmp_path / "checkpoints", tmp_path / "nothing"), code=1)
        assert "BrokenRecord: the checkpoint" in refused.stderr
        share.write_bytes(content)
    assert on_ranks(1, "read", tmp_path / "checkpoints")
