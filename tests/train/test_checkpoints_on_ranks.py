"""What some ranks wrote, another number of ranks reads: weights, tied ones too, and moments of policy and critic."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.tiny_models import make_checkpoint
from tests.warm_python import warm_python, warm_ranks

pytestmark = pytest.mark.slow

Sums = dict[str, list[float]]
Written = Callable[[int], tuple[Path, Sums]]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embeddings."""
    return make_checkpoint(tmp_path_factory.mktemp("tied") / "model", num_hidden_layers=2, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def written(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The checkpoints that so many ranks wrote, made once, and the sums of what is in them."""

    @cache
    def by(ranks: int) -> tuple[Path, Sums]:
        folder = tmp_path_factory.mktemp("written") / "checkpoints"
        return folder, on_ranks(ranks, "write", tied, folder)

    return by


def program(what: str, model: Path, folder: Path, output: Path) -> tuple[str, ...]:
    return ("tests.train.checkpoint_on_ranks", what, str(model), str(folder), str(output))


def on_ranks(ranks: int, what: str, model: Path, folder: Path) -> Sums:
    output = folder.parent / f"{what}-{ranks}.json"
    warm_ranks(ranks, *program(what, model, folder, output))
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_what_some_ranks_wrote_others_read(tied: Path, written: Written, writers: int, readers: int) -> None:
    folder, sums = written(writers)
    assert on_ranks(readers, "read", tied, folder) == sums
    assert any(name.endswith("exp_avg_sq") and pair[0] > 0 for name, pair in sums.items())
    assert not [path for path in folder.rglob("*") if path.suffix in (".metadata", ".distcp", ".pt", ".bin")]


def test_a_rank_whose_share_is_gone_is_missed(tied: Path, written: Written, tmp_path: Path) -> None:
    folder = copytree(written(2)[0], tmp_path / "checkpoints")
    state = folder / "step-000001" / "state"
    first, last = sorted(state.iterdir())
    for share in (first, last):
        content = share.read_bytes()
        share.unlink()
        refused = warm_python(*program("read", tied, folder, tmp_path / "nothing"), code=1)
        assert "BrokenRecord: the checkpoint" in refused.stderr
        share.write_bytes(content)
    assert on_ranks(1, "read", tied, folder)
