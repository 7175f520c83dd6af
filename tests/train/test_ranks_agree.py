"""What one rank measures, all of them know; what guards make of it, all of them do."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.train import distributed
from tests.train.slow_rank import STEPS
from tests.warm_python import warm_ranks


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0]])
def test_a_value_that_is_no_number_on_one_rank_is_none_on_all(
    values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_every_rank(own: list[float]) -> list[Any]:
        return [*own, values[1]]

    monkeypatch.setattr(distributed, "gather", of_every_rank)
    assert math.isnan(distributed.largest(values[0]))


@pytest.mark.slow
def test_a_guard_on_time_decides_alike_on_every_rank(llama: Path, tmp_path: Path) -> None:
    warm_ranks(2, "tests.train.slow_rank", llama, tmp_path)
    first, second = (json.loads((tmp_path / f"decided-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert len(first) == STEPS
