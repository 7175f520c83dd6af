"""What some ranks wrote, another number of ranks reads: weights, tied ones too, and moments of policy and critic."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.demo_checkpoint import DEMO_CHECKPOINT

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def on_ranks(ranks: int, what: str, folder: Path, *, fails: bool = False) -> dict[str, Any]:
    output = folder.parent / f"{what}-{ranks}.json"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = ["-m", "tests.train.checkpoint_on_ranks", what, str(DEMO_CHECKPOINT), str(folder), str(output)]
    ended = subprocess.run(
        [sys.executable, *launch, *words],
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if fails:
        return {"code": ended.returncode, "stderr": ended.stderr}
    assert ended.returncode == 0, ended.stderr
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
        refused = on_ranks(1, "read", tmp_path / "checkpoints", fails=True)
        assert refused["code"] == 1
        assert "BrokenRecord: the checkpoint" in refused["stderr"]
        share.write_bytes(content)
    assert on_ranks(1, "read", tmp_path / "checkpoints")
