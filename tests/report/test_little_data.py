"""A page for every run: of one response, and of sides that agree to the last bit."""

from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.compare.summarise import summarise
from mismatch_probe.report.page import write_report
from tests.report.pages import drawings, words
from tests.simulated_run import Simulation, edit_leg, simulated_run

LEGS = ("infer-bf16-decode", "train-bf16", "ref-fp32")


@pytest.mark.parametrize("num_prompts", [1, 3, 7])
def test_a_run_of_few_responses_has_a_page(tmp_path: Path, num_prompts: int) -> None:
    run = simulated_run(tmp_path / "run", Simulation(num_prompts=num_prompts), with_summary=True)
    assert "too few responses" in words(drawings(write_report(run).read_text())["overview-cumulative"])


def test_a_run_without_a_usable_response_says_so_in_place_of_its_divergence(tmp_path: Path) -> None:
    def lost(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[float("nan")] * len(row) for row in columns["logprobs"]]

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=4))
    edit_leg(run, "train-bf16", lost)
    run.write_summary(summarise(run, run.read_manifest()))
    assert "Nothing to draw" in words(drawings(write_report(run).read_text())["overview-kl"])


def test_sides_that_agree_to_the_last_bit_have_a_page(tmp_path: Path) -> None:
    def certain(columns: dict[str, Any]) -> None:
        columns["logprobs"] = [[0.0] * len(row) for row in columns["logprobs"]]

    run = simulated_run(tmp_path / "run", Simulation(num_prompts=16))
    for leg in LEGS:
        edit_leg(run, leg, certain)
    run.write_summary(summarise(run, run.read_manifest()))
    assert "no deviation" in words(drawings(write_report(run).read_text()))
