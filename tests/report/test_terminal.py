"""The terminal tells the same story in the same strings."""

import io
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import write_tokens
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.page import render_html
from mismatch_probe.report.terminal import render_terminal
from tests.report import samples

CROSSED: samples.Pairs = (
    (Dtype.BF16, Dtype.BF16),
    (Dtype.FP16, Dtype.FP16),
    (Dtype.FP32, Dtype.FP32),
    (Dtype.FP32, Dtype.BF16),
)


def printed(summary: Summary, *, width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    render_terminal(summary, console, Path("runs/one two"))
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("simulation", [samples.Simulation(), samples.Simulation(bug_nats=2.0)], ids=["clean", "bug"])
def test_every_number_of_the_terminal_stands_on_the_page(simulation: samples.Simulation) -> None:
    summary = samples.summary(CROSSED, simulation)
    page = unescape(re.sub(r"<[^>]+>", "", render_html(summary, samples.manifest(CROSSED))))
    numbers = re.findall(r"[-\d][\d.,]*(?:e-?\d+)?[kMBT]?[*†]?", printed(summary))
    assert len(numbers) > 20
    assert [number for number in numbers if number.rstrip(",") not in page] == []
    for interval in re.findall(r"\[[^\]]+\]", printed(summary)):
        assert interval in page


def test_a_pipe_gets_one_line_a_pair_and_no_control_codes() -> None:
    text = printed(samples.summary(CROSSED), width=40)
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if "precision" in line and "e-" in line]
    assert len(rows) == 3


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_is_never_overrun_and_no_number_is_cut(width: int) -> None:
    text = printed(samples.summary(CROSSED), width=width, terminal=True)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_hostile_text_cannot_drive_the_terminal() -> None:
    hostile = "\x1b[2J\u202e[bold red]"
    text = printed(samples.summary(((Dtype.BF16, Dtype.BF16),), samples.Simulation(hostile=hostile)), terminal=True)
    assert "\x1b[2J" not in text
    assert "<U+001B>[2J<U+202E>[bold red]" in text


def test_data_that_was_left_out_is_named() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    broken = pair.model_copy(update={"counts": pair.counts.model_copy(update={"missing_mu": 1234})})
    assert "1,234 log-probs missing" in printed(summary.model_copy(update={"pairs": [broken]}))
    broken = pair.model_copy(update={"counts": pair.counts.model_copy(update={"positive_pi": 17})})
    assert "17 above 0" in printed(summary.model_copy(update={"pairs": [broken]}))


def test_an_extrapolated_budget_is_marked_and_explained() -> None:
    text = printed(samples.summary(((Dtype.FP16, Dtype.FP16),)))
    assert "* extrapolated beyond the longest response measured" in text
    assert re.search(r"\d[kMBT]?\* \[", text)


def test_a_budget_that_could_not_be_fitted_is_the_closed_form_and_says_so() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    assert pair.length is not None
    unfitted = replace(pair.length, budget_tokens=None, longest_budget_is_extrapolated=False)
    text = printed(summary.model_copy(update={"pairs": [pair.model_copy(update={"length": unfitted})]}))
    assert f"{write_tokens(pair.length.budget_closed_form).value}†" in text
    assert "† none could be fitted" in text


def test_a_command_to_copy_names_the_folder_of_the_run() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    pair = summary.pairs[0]
    advice = [
        "Look: mismatch-probe localize --run RUN --dtype bf16",
        "See: mismatch-probe headroom --run RUN",
        "Decide: mismatch-probe compare --out RUN --resume --dtype fp32",
    ]
    told = pair.model_copy(update={"verdict": pair.verdict.model_copy(update={"advice": advice})})
    said = " ".join(printed(summary.model_copy(update={"pairs": [told]}), width=400).split())
    assert "mismatch-probe localize --run 'runs/one two' --dtype bf16" in said
    assert "mismatch-probe headroom --run 'runs/one two'" in said
    assert "mismatch-probe compare --out 'runs/one two' --resume --dtype fp32" in said
    assert " RUN" not in said
