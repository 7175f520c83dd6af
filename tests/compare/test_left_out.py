"""A side that the engine cannot compute is left out with its reason; a wrong argument, and a run without sides, end."""

from pathlib import Path

import pytest

from mismatch_probe.compare.continuation import without_side
from mismatch_probe.compare.plan import make_plan
from mismatch_probe.compare.preparation import prepare, without_refused
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import ModelSettings, PromptSettings, SamplingSettings
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import StartRefused, UsageError
from tests.tiny_models import make_checkpoint

SETTINGS = CompareSettings(model=ModelSettings(path="there"))
REFUSED = UsageError("vLLM refuses 'there' in fp16: it says so")


def test_a_dtype_that_the_engine_refuses_is_left_out_where_it_takes_another() -> None:
    settings, left_out = without_refused(SETTINGS, {"fp16": REFUSED})
    assert settings.pairs == (("bf16", "bf16"), ("fp32", "fp32"))
    assert left_out == {"fp16": str(REFUSED)}
    assert without_refused(SETTINGS, {}) == (SETTINGS, {})


def test_a_run_whose_every_side_is_refused_ends_with_the_first_reason() -> None:
    with pytest.raises(UsageError, match="it says so"):
        without_refused(SETTINGS, dict.fromkeys(("bf16", "fp16", "fp32"), REFUSED))


def test_an_argument_that_only_the_refused_side_has_is_whoever_typed_its_to_fix() -> None:
    wrong = InferSide(name="wrong", dtype=Dtype.BF16, args={"block_size": 3})
    settings = SETTINGS.model_copy(update={"infer": (wrong,), "pairs": (("bf16", "bf16"), ("bf16", "wrong"))})
    with pytest.raises(UsageError, match="block_size"):
        without_refused(settings, {"wrong": UsageError("vLLM refuses --vllm.block_size 3")})
    smaller, left_out = without_refused(settings, {"wrong": StartRefused("vLLM does not support the architecture X")})
    assert smaller.pairs == (("bf16", "bf16"),)
    assert smaller.infer == ()
    assert list(left_out) == ["wrong"]


@pytest.mark.slow
def test_a_checkpoint_that_the_engine_refuses_in_one_dtype_is_compared_in_the_others(tmp_path: Path) -> None:
    gemma = make_checkpoint(tmp_path / "gemma", "gemma2")
    settings = CompareSettings(
        model=ModelSettings(path=str(gemma)),
        prompts=PromptSettings(source="sums:easy", num_prompts=2),
        sampling=SamplingSettings(max_new_tokens=4),
    )
    manifest = prepare(settings).manifest
    assert [pair for pair, _ in manifest.settings.pairs] == ["bf16", "fp32"]
    assert "in fp16" in manifest.left_out["fp16"]
    assert not any("fp16" in stage for stage in manifest.stages)

    alone = prepare(settings.model_copy(update={"pairs": (("bf16", "bf16"),)})).manifest
    assert alone.left_out == {}
    assert "in fp16" in (alone.fp16_refused or "")
    assert prepare(settings.model_copy(update={"pairs": (("fp32", "fp32"),)})).manifest.fp16_refused is None

    smaller = without_side(manifest, "bf16", StartRefused("it does not start"))
    assert set(smaller.stages) == {stage.name for stage in make_plan(smaller.settings).stages}
    assert smaller.left_out["bf16"] == "it does not start"
    with pytest.raises(StartRefused, match="nor this"):
        without_side(smaller, "fp32", StartRefused("nor this"))
