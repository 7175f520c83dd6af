"""Where the cells that run at once run: each with GPUs of its own, and no more of them than fit."""

from typing import Any

import pytest

from mismatch_probe.ablate import forecast
from mismatch_probe.ablate.forecast import AblationForecast, VariantForecast, places_for
from mismatch_probe.compare.cost.memory import ProcessMemory
from mismatch_probe.config.ablate import Ablation
from mismatch_probe.errors import UsageError


def ablation(**settings: Any) -> Ablation:
    return Ablation.of({"model": {"path": "demo"}, "steps": 4, "grid": {"seed": [0, 1]}, **settings})


def forecast_of(peak_bytes: int, available_bytes: int) -> AblationForecast:
    memory = ProcessMemory(
        process="a cell", stage="a step", device="cpu", peak_bytes=peak_bytes, available_bytes=available_bytes
    )
    variants = [VariantForecast(label=label, cells=1, each=None, memory=memory) for label in ("bf16", "fp16")]
    return AblationForecast(model="demo", variants=variants, total=None)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "gpus", lambda: ["a card"] * 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_a_gpu_cells_run_side_by_side_while_they_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "gpus", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert places_for(ablation(), 3, forecast_of(10, 30)) == [{}, {}, {}]
    with pytest.raises(UsageError, match="give --at-once 2, or lower --max-new-tokens"):
        places_for(ablation(), 3, forecast_of(10, 29))


@pytest.mark.usefixtures("four_gpus")
def test_each_cell_has_a_gpu_of_its_own() -> None:
    places = places_for(ablation(), 3, forecast_of(10, 11))
    assert places == [{"CUDA_VISIBLE_DEVICES": number} for number in "012"]


@pytest.mark.usefixtures("four_gpus")
def test_an_engine_that_is_divided_over_gpus_has_as_many_in_its_cell() -> None:
    divided = ablation(engine={"args": {"tensor_parallel_size": 2}})
    places = places_for(divided, 2, forecast_of(10, 11))
    assert places == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    with pytest.raises(UsageError, match="each of the cells needs 2 GPUs of its own, and 4 can be used"):
        places_for(divided, 3, forecast_of(10, 11))


@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_the_environment_hides_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    places = places_for(ablation(), 2, forecast_of(10, 11))
    assert places == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    with pytest.raises(UsageError, match="2 can be used; give --at-once 2"):
        places_for(ablation(), 3, forecast_of(10, 11))


@pytest.mark.usefixtures("four_gpus")
def test_no_gpu_is_used_where_the_environment_hides_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert places_for(ablation(), 2, forecast_of(10, 20)) == [{}, {}]
