"""A new engine needs a folder of its own, and its name in one line of the settings."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mismatch_probe import engines
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import start_engine
from mismatch_probe.engines.rehearsal import check_engine, with_typed_arguments
from mismatch_probe.errors import UsageError
from mismatch_probe.records.sequences import TokenSequence

PACKAGE = Path(engines.__path__[0]).parent

FILES = {
    "__init__": """
        import numpy as np
        from mismatch_probe.engines.base import Engine
        from mismatch_probe.records.sequences import ScoredSequence

        class Uniform(Engine):
            vocab_size = 4
            def sample(self, requests, sampling): return []
            def distributions(self, contexts): return np.full((len(contexts), 4), -np.log(4))
            def replay(self, sequences):
                return [ScoredSequence(one.id, np.full(len(one.token_ids), -np.log(4))) for one in sequences]
            def update_weights(self, weights): pass
            def effective_settings(self): return {"dtype": "fp64"}
            def close(self): pass

        PACKAGES = ()
        def start(checkpoint, dtype, engine, sampling, **more): return Uniform()
    """,
    "arguments": """
        def known_arguments(): return {"size": "int"}
        def default_arguments(): return {"size": 8}
        def engine_arguments(given, known): return {name: int(value) for name, value in given.items()}
    """,
    "limits": """
        from mismatch_probe.errors import UsageError
        def check_limits(dtype, sampling, engine):
            if dtype != "fp64": raise UsageError("uniform knows fp64 alone")
    """,
}


@pytest.fixture
def uniform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSettings]:
    """Settings that name an engine whose folder is somewhere else."""
    folder = tmp_path / "uniform"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    yield EngineSettings.model_construct(name="uniform", args={"size": "4"})
    for module in [name for name in sys.modules if name.startswith("mismatch_probe.engines.uniform")]:
        del sys.modules[module]


def test_an_engine_is_found_by_its_folder(uniform: EngineSettings) -> None:
    assert with_typed_arguments(uniform, uniform.name).args == {"size": 4}
    check_engine(Dtype.FP64, SamplingSettings(), uniform)
    with pytest.raises(UsageError, match="fp64 alone"):
        check_engine(Dtype.BF16, SamplingSettings(), uniform)
    with start_engine("none", Dtype.FP64, uniform, SamplingSettings(), max_model_len=8) as engine:
        [scored] = engine.replay([TokenSequence("a", [1], [2, 3])])
    assert scored.logprobs == pytest.approx([-1.386294, -1.386294])


def test_a_name_that_no_line_of_the_settings_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="vllm"):
        EngineSettings(name="uniform")  # type: ignore[arg-type]


def test_what_samples_and_scores_names_no_engine() -> None:
    """Looking inside an engine (`localize`), its memory, its preload and its weight transfer are of one engine; a
    comparison is of any.
    """
    inside = ("localize", "compare/cost", "children/servers.py", "engines/server/transfer.py", "engines/vllm")
    naming = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "engines.vllm" in path.read_text(encoding="utf-8")
    ]
    assert [path for path in naming if not path.startswith(inside)] == []
