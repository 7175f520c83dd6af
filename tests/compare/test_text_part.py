"""Checkpoints that see too: their text part is compared, and what vLLM cannot load is known before anything runs."""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mismatch_probe.compare.preparation import prepare
from mismatch_probe.compare.run import execute, start_run
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.examinations import LocalizeSettings
from mismatch_probe.config.model import (
    EngineSettings,
    ModelSettings,
    PromptSettings,
    ReferenceSettings,
    SamplingSettings,
)
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.start import without_defaults
from mismatch_probe.engines.vllm import declared
from mismatch_probe.engines.vllm.declared import import_model_file, known_arguments, text_part_defaults
from mismatch_probe.errors import EngineError, StartRefused, UsageError
from mismatch_probe.localize.run import localize
from mismatch_probe.records.summary import Summary
from mismatch_probe.training_path.fit import require_fit
from tests.tiny_models import WITH_EYES, make_checkpoint

PROMPTS = PromptSettings(source="sums:easy", num_prompts=3)
TEXT = SimpleNamespace()
WHOLE = SimpleNamespace(architectures=["Seeing"])


def compared(folder: Path, run: Path, **changes: Any) -> Summary:
    settings = CompareSettings(
        model=ModelSettings(path=str(folder)),
        pairs=(("fp32", "fp32"),),
        prompts=PROMPTS,
        sampling=SamplingSettings(max_new_tokens=12),
    )
    preparation = prepare(settings.model_copy(update=changes))
    return execute(start_run(run, preparation), lambda event: None)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_EYES)
def test_text_of_a_model_that_sees_too_is_the_same_on_both_sides(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", family)
    require_fit(folder, trust_remote_code=False)
    layered = ReferenceSettings(by_layer=True)
    with pytest.raises(EngineError, match="cannot be computed layer by layer"):
        compared(folder, tmp_path / "run", reference=layered)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="models of text alone"):
        localize(LocalizeSettings(model=ModelSettings(path=str(folder)), prompts=PROMPTS), tmp_path, print)
    summary = compared(folder, tmp_path / "run")
    assert [pair.verdict.kind for pair in summary.pairs] == ["clean"]


@pytest.mark.slow
def test_other_weights_of_its_text_part_are_seen(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2.5-vl")
    other = make_checkpoint(tmp_path / "other", "qwen2.5-vl")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    side = InferSide(name="other", dtype=Dtype.FP32, checkpoint=str(other))
    (pair,) = compared(folder, tmp_path / "run", infer=(side,), pairs=(("fp32", "other"),)).pairs
    assert (pair.verdict.kind, pair.verdict.code) == ("bug", "stale_weights")


def test_only_a_model_that_sees_too_and_of_which_nothing_is_said_leaves_images_out() -> None:
    assert text_part_defaults(TEXT, TEXT, {}, known_arguments()) == {}
    assert text_part_defaults(WHOLE, TEXT, {"limit_mm_per_prompt": {"image": 1}}, known_arguments()) == {}
    assert text_part_defaults(WHOLE, TEXT, {}, known_arguments()) == {"language_model_only": True}
    kept = without_defaults(EngineSettings(args={"language_model_only": False}), "vllm")
    assert text_part_defaults(WHOLE, TEXT, kept.args, known_arguments()) == {}


def registered(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    models = {"Seeing": SimpleNamespace(load_model_cls=load)}
    registry = SimpleNamespace(ModelRegistry=SimpleNamespace(models=models))

    def module(name: str) -> Any:
        return registry if name.startswith("vllm") else import_module(name)

    monkeypatch.setattr(declared, "import_module", module)


def test_a_package_that_the_model_file_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, lambda: import_module("no_such_package"))
    with pytest.raises(StartRefused, match=r"model file of Seeing \(No module named 'no_such_package'\); install that"):
        import_model_file(WHOLE, TEXT)
    import_model_file(TEXT, TEXT)
    with pytest.raises(StartRefused, match="model file of Seeing"):
        import_model_file(part := SimpleNamespace(model_type="seeing_text", architectures=["Seeing"]), part)


def test_torchvision_is_stood_in_for_only_while_the_model_file_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    if "torchvision" in sys.modules:
        pytest.skip("torchvision is installed here")
    taken: list[Any] = []
    registered(monkeypatch, lambda: taken.append(import_module("torchvision.transforms.v2").functional))
    import_model_file(WHOLE, TEXT)
    assert isinstance(taken[0].resize, type)
    assert "torchvision" not in sys.modules
