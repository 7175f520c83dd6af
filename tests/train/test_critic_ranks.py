"""Two ranks learn what one learns, policy and critic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.warm_python import warm_ranks

pytestmark = pytest.mark.slow


def learn(ranks: int, checkpoint: Path, output: Path) -> dict[str, Any]:
    warm_ranks(ranks, "tests.train.ppo_on_ranks", checkpoint, output)
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return found


def test_two_ranks_follow_one(llama: Path, tmp_path: Path) -> None:
    one, two = (learn(ranks, llama, tmp_path / f"{ranks}.json") for ranks in (1, 2))
    assert np.abs(one["values"]).max() > 0.1
    assert np.allclose(one["values"], two["values"], atol=1e-3)
    assert np.allclose(one["log_pi"], two["log_pi"], atol=1e-3)
    for alone, together in zip(one["told"], two["told"], strict=True):
        assert together == pytest.approx(alone, rel=1e-3, abs=1e-5)
