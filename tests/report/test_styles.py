"""Sides of a page are told apart by colour and dash, and look the same in all of its figures."""

import re
from itertools import product
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report import names
from mismatch_probe.report.names import OTHER_COLORS, PairStyle, dtypes_style, pair_styles
from mismatch_probe.report.page import render_arrays
from tests.report import samples
from tests.report.pages import drawings

BF16, FP16, FP32 = Dtype.BF16, Dtype.FP16, Dtype.FP32


def pair_of(train: str, infer: str) -> PairSummary:
    pair = samples.undrawn(samples.summary(((BF16, BF16),))).pairs[0]
    return pair.model_copy(update={"train": train, "infer": infer})


def styles_of(*sides: tuple[str, str]) -> list[PairStyle]:
    pairs = [pair_of(*pair) for pair in sides]
    style_of = pair_styles(pairs)
    return [style_of(pair) for pair in pairs]


def looks(styles: list[PairStyle]) -> set[tuple[str, tuple[float, ...]]]:
    return {(style.color, style.dash) for style in styles}


ENGINES = ("compiled", "two-ranks", "fp8kv", "fp8weights", "stale", "lora", "lora32")


@pytest.mark.parametrize("dtype", Dtype)
def test_every_format_has_a_line_and_a_colour(dtype: Dtype) -> None:
    assert dtypes_style(dtype, dtype).color == dtype
    assert f"--fig-{dtype}: " in (Path(names.__file__).parent / "templates" / "report.css").read_text()


def test_engines_of_many_names_have_a_colour_each() -> None:
    styles = styles_of(("bf16", "bf16"), *(("bf16", name) for name in ENGINES), ("lora", "lora"))
    assert len({style.color for style in styles}) == len(ENGINES) + 1
    assert len(looks(styles)) == len(styles)


def test_a_training_side_with_a_name_is_told_from_the_dtype_beside_it() -> None:
    assert len(looks(styles_of(("bf16", "bf16"), ("autocast", "bf16"), ("merged", "bf16")))) == 3


@pytest.mark.parametrize("num_engines", [1, len(OTHER_COLORS)])
def test_no_two_pairs_look_alike_as_far_as_the_palette_reaches(num_engines: int) -> None:
    trains, engines = ("bf16", "a", "b", "c"), [f"engine-{number}" for number in range(num_engines)]
    styles = styles_of(*product(trains, engines))
    assert len(looks(styles)) == len(styles)


def test_beyond_the_palette_there_is_a_style_still() -> None:
    pairs = [("bf16", f"engine-{number}") for number in range(200)]
    assert len(set(styles_of(*pairs))) == 16 * len(OTHER_COLORS)


def test_dtypes_look_the_same_whatever_is_beside_them() -> None:
    assert styles_of(("bf16", "bf16")) == styles_of(("bf16", "other"), ("bf16", "bf16"))[1:]


@pytest.mark.slow
def test_a_pair_looks_the_same_in_all_figures_of_its_page() -> None:
    summary = samples.summary(((BF16, BF16), (FP16, FP16), (FP32, FP32)))
    names = {"fp16": "lora", "fp32": "compiled"}
    pairs = [pair.model_copy(update={"infer": names.get(pair.infer, pair.infer)}) for pair in summary.pairs]
    page = render_arrays(summary.model_copy(update={"pairs": pairs, "contrasts": []}))
    style_of = pair_styles(pairs)
    groups = {style_of(pair).group for pair in pairs}
    keys = re.findall(r'<ul class="key".*?</ul>', page, re.S)
    of_pairs = [set(re.findall(r'data-group="([^"]+)"', key)) for key in keys if 'data-group="bf16-o"' in key]
    assert of_pairs
    assert all(shown == groups for shown in of_pairs)
    for anchor in ("overview-cumulative", "length-position", "confidence-mean"):
        drawn = {trace.get("legendgroup") for trace in drawings(page)[anchor]["data"]} - {None}
        assert drawn == groups
