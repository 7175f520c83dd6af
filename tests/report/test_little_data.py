"""A page for every run: of one response, and of sides that agree to the last bit."""

import re
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.report.names import pair_styles
from mismatch_probe.report.page import write_report
from mismatch_probe.report.sections.length import FEWEST_RESPONSES, draw_size
from mismatch_probe.report.view import Heading
from tests.report import samples
from tests.report.pages import drawings
from tests.simulated_run import Simulation, edit_leg, simulated_run

LEGS = ("infer-bf16-decode", "train-bf16", "ref-fp32")


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [1, 3, 7])
def test_a_run_of_few_responses_has_a_page(tmp_path: Path, num_prompts: int) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=num_prompts), with_summary=True)
    page = write_report(run).read_text()
    assert "overview-cumulative" not in drawings(page)
    assert 'id="overview-cumulative"' not in page
    left_out = [caption for caption in captions(page) if "“How it adds up: log importance weight”" in caption]
    assert [caption.count("Left out, for too few responses") for caption in left_out] == [1]
    assert all(drawing["data"] for drawing in drawings(page).values())


@pytest.mark.slow
def test_responses_of_one_length_make_no_curve_over_lengths(tmp_path: Path) -> None:
    pair = samples.summary().pairs[0]
    assert pair.length is not None
    [one] = pair.length.abs_diff_by_response_length[:1]
    assert one.mean.num_sequences >= FEWEST_RESPONSES
    heading = Heading("anchor", "title", "words")
    style = pair_styles([pair])
    assert not draw_size(heading, [(pair, [one])], "T", style).shows_something
    assert draw_size(heading, [(pair, [one, one])], "T", style).shows_something


def test_a_run_without_a_usable_response_says_so_and_draws_nothing(tmp_path: Path) -> None:
    def lost(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[float("nan")] * len(row) for row in columns["logprobs"]]

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=4))
    edit_leg(run, "train-bf16", lost)
    run.write_summary(summarise(run, run.read_manifest()))
    page = write_report(run).read_text()
    assert 'id="overview-kl"' not in page
    assert captions(page) == []
    assert "the data is broken" in page.lower()


@pytest.mark.slow
def test_sides_that_agree_to_the_last_bit_have_a_page(tmp_path: Path) -> None:
    def certain(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[0.0] * len(row) for row in columns["logprobs"]]

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=16))
    for leg in LEGS:
        edit_leg(run, leg, certain)
    run.write_summary(summarise(run, run.read_manifest()))
    assert any("no deviation" in caption for caption in captions(write_report(run).read_text()))


def captions(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
