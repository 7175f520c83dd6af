"""An engine is one object that keeps a contract, under one name; nothing else names it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe import engines
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, EngineProvider, EngineStart
from mismatch_probe.engines.start import (
    ENGINES,
    check_engine,
    reach,
    start_engine,
    with_typed_arguments,
    without_defaults,
)
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import FloatArray, SampledSequence, SampleRequest, ScoredSequence, TokenSequence

PACKAGE = Path(engines.__path__[0]).parent


class Uniform(Engine):
    vocab_size = 4

    def sample(self, requests: Sequence[SampleRequest], sampling: SamplingSettings) -> list[SampledSequence]:
        return []

    def distributions(self, contexts: Sequence[Sequence[int]]) -> FloatArray:
        return np.full((len(contexts), 4), -np.log(4), dtype=np.float32)

    def replay(self, sequences: Sequence[TokenSequence]) -> list[ScoredSequence]:
        return [
            ScoredSequence(sequence.id, np.full(len(sequence.token_ids), -np.log(4), dtype=np.float32))
            for sequence in sequences
        ]

    def update_weights(self, weights: object) -> None: ...

    def effective_settings(self) -> dict[str, Any]:
        return {"engine": "uniform", "dtype": "fp64", "prefix_caching": False}

    def close(self) -> None: ...


class UniformProvider(EngineProvider):
    def start(self, how: EngineStart) -> Engine:
        return Uniform()

    def read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: int(value) for name, value in arguments.items()}

    def check_limits(self, dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
        if dtype != Dtype.FP64:
            raise UsageError("uniform knows fp64 alone")


class Bare(EngineProvider):
    def start(self, how: EngineStart) -> Engine:
        return Uniform()


@pytest.fixture
def uniform(monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """Settings that name an engine which is no part of the package."""
    engines = {**ENGINES.built_in, "uniform": UniformProvider(), "bare": Bare()}
    monkeypatch.setattr(ENGINES, "built_in", engines)
    return EngineSettings(name="uniform", args={"size": "4"})


def test_an_engine_offers_one_object(uniform: EngineSettings) -> None:
    assert with_typed_arguments(uniform, uniform.name).args == {"size": 4}
    check_engine(Dtype.FP64, SamplingSettings(), uniform)
    with pytest.raises(UsageError, match="fp64 alone"):
        check_engine(Dtype.BF16, SamplingSettings(), uniform)
    with start_engine("none", Dtype.FP64, uniform, SamplingSettings(), max_model_len=8) as engine:
        [scored] = engine.replay([TokenSequence("a", [1], [2, 3])])
    assert scored.logprobs == pytest.approx([-1.386294, -1.386294])


def test_an_engine_without_arguments_or_limits_needs_its_start_alone(uniform: EngineSettings) -> None:
    bare = EngineSettings(name="bare")
    check_engine(Dtype.FP16, SamplingSettings(temperature=0.001), bare)
    assert reach(bare) is None
    assert without_defaults(bare, "bare") == with_typed_arguments(bare, "bare") == bare
    with pytest.raises(UsageError, match=r"engine\.args\.size cannot be given: this engine has no arguments"):
        with_typed_arguments(uniform, "bare")


def test_a_name_that_no_engine_has_is_refused_but_a_run_that_names_it_is_read() -> None:
    elsewhere = EngineSettings(name="vlm")
    with pytest.raises(UsageError, match=r"engine\.name = 'vlm' is none of the known engines; .* vllm, server"):
        check_engine(Dtype.BF16, SamplingSettings(), elsewhere)
    with pytest.raises(UsageError, match="'vlm'"):
        with_typed_arguments(elsewhere, elsewhere.name)
    with pytest.raises(ValueError, match="pattern"):
        EngineSettings(name="../vllm")


def test_what_samples_and_scores_names_no_engine() -> None:
    """Looking inside an engine (`localize`), its memory, its preload and its weight transfer are of one engine; a
    comparison is of any.
    """
    inside = (
        "localize",
        "compare/cost",
        "children/servers.py",
        "engines/server/transfer.py",
        "engines/start.py",
        "engines/vllm",
    )
    naming = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "engines.vllm" in path.read_text(encoding="utf-8")
    ]
    assert [path for path in naming if not path.startswith(inside)] == []
