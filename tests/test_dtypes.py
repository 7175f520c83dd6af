"""Facts about number formats: right, and in one place."""

import ast
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import mismatch_probe
from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.model import ReferenceSettings
from mismatch_probe.dtypes import COARSEST_FIRST, COMPUTED_IN, Dtype, short_name
from mismatch_probe.errors import UsageError

PACKAGE = Path(mismatch_probe.__file__).parent
LISTING = {"dtypes.py", "config/comparison.py"}
"""What a new format is written in: itself, and what a run compares unless told."""


@pytest.mark.parametrize("dtype", Dtype)
def test_the_facts_are_those_of_torch(dtype: Dtype) -> None:
    theirs = torch.finfo(getattr(torch, dtype.torch_name))
    assert (dtype.num_bytes * 8, dtype.largest, 2 * dtype.round_off) == (theirs.bits, theirs.max, theirs.eps)
    assert 2.0 ** (dtype.least_exponent - 1) == theirs.smallest_normal
    assert dtype.rounds_coarsely == (theirs.eps > torch.finfo(torch.float32).eps)
    assert dtype.is_autocast_target == (theirs.bits == 16)
    stored = save({"x": torch.zeros(1, dtype=getattr(torch, dtype.torch_name))})
    assert f'"dtype":"{dtype.safetensors_name}"'.encode() in stored


def test_a_reference_is_what_rounds_no_more_than_fp32_and_only_it_can_be_fp64() -> None:
    assert [dtype for dtype in Dtype if dtype.can_be_reference] == [Dtype.FP64, Dtype.FP32]
    assert COMPUTED_IN == (Dtype.FP32, Dtype.FP16, Dtype.BF16)
    assert COARSEST_FIRST == [Dtype.BF16, Dtype.FP16]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bf16", Dtype.BF16), ("torch.bfloat16", Dtype.BF16), (" Half ", Dtype.FP16), ("float", Dtype.FP32)],
)
def test_every_spelling_of_the_field_is_read(text: str, dtype: Dtype) -> None:
    assert Dtype.parse(text) is dtype


@pytest.mark.parametrize(("text", "words"), [("auto", "it hides"), ("int8", "give one of .*fp32, .*bf16")])
def test_what_is_no_format_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Dtype.parse(text)


def test_a_name_of_no_format_stays_as_it_is() -> None:
    assert [short_name(name) for name in (torch.float16, "float8_e4m3fn", "auto")] == ["fp16", "float8_e4m3fn", "auto"]


def test_settings_take_text_and_give_text() -> None:
    text = '{"model":{"path":"demo"},"pairs":[["bfloat16","half"]],"training":{"lm_head_dtype":"float"}}'
    for settings in (CompareSettings.model_validate_json(text), CompareSettings(**json.loads(text))):
        assert settings.pairs == ((Dtype.BF16, Dtype.FP16),)
        assert settings.training.lm_head_dtype is Dtype.FP32
        assert settings.model_dump(mode="json")["pairs"] == [["bf16", "fp16"]]
        assert f"{settings.pairs[0][0]} {settings.pairs[0][1]}" == "bf16 fp16"


def test_a_reference_of_16_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="bf16 is too coarse to hold others against; give fp32 or fp64"):
        ReferenceSettings(dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_new_format_is_written_in_two_files() -> None:
    listing = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if _lists_formats(path.read_text())}
    assert listing - {"dtypes.py"} == LISTING - {"dtypes.py"}


@pytest.mark.parametrize(
    "code",
    [
        'BYTES = {"fp32": 4, "bf16": 2}',
        'STORED = {"F64": Dtype.FP64, "F32": Dtype.FP32}',
        'if dtype in ("fp16", "bf16"): pass',
        "WIDE = [Dtype.FP64, Dtype.FP32]",
        'Held: Literal["fp16", "bf16"]',
    ],
)
def test_a_list_of_formats_is_seen(code: str) -> None:
    assert _lists_formats(code)


def _lists_formats(code: str) -> bool:
    """Whether a tuple, list, set or table names formats, more than one, and nothing else."""
    for node in ast.walk(ast.parse(code)):
        lists: list[list[ast.expr | None]] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            lists = [[*node.elts]]
        elif isinstance(node, ast.Dict):
            lists = [[*node.keys], [*node.values]]
        if any(len({_format(one) for one in listed}) > 1 and all(map(_format, listed)) for listed in lists):
            return True
    return False


def _format(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and node.value in tuple(Dtype):
        return str(node.value)
    is_member = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "Dtype"
    return node.attr if is_member and node.attr in Dtype.__members__ else None  # type: ignore[union-attr]
