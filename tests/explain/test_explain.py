from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain import explain
from mismatch_probe.records.sequences import TokenSequence
from tests.explain.logs import logged, scored, settings


@pytest.mark.parametrize("temperature", [0.7, 0.97])
def test_a_hidden_temperature_is_named_with_its_value(
    llama: Path, responses: list[TokenSequence], temperature: float
) -> None:
    log = logged(responses, mu=scored(llama, responses, temperature=temperature))
    explanation = explain(settings(llama), log)
    assert explanation.verdict.code == "temperature"
    (side,) = explanation.sides
    assert side.explained_by is not None
    assert side.explained_by.departures[0].value == pytest.approx(temperature, rel=0.01)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16, Dtype.FP32])
def test_a_clean_log_is_as_declared(llama: Path, responses: list[TokenSequence], dtype: Dtype) -> None:
    log = logged(responses, mu=scored(llama, responses, dtype), pi=scored(llama, responses, dtype))
    declared = {"dtype": dtype}
    explanation = explain(settings(llama, mu=declared, pi=declared), log)
    assert [side.verdict.code for side in explanation.sides] == ["as_declared", "as_declared"]
