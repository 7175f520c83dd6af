"""The checks are one table: the screen and Markdown show the same cells of it."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mismatch_probe.notation import write_estimate
from mismatch_probe.records.answers import CheckResult
from mismatch_probe.report.answers.gate import checks_table, pair_label, passing_text
from mismatch_probe.report.markdown import escape, escaped_cell, markdown_table
from mismatch_probe.report.screen import in_full, print_fitting, print_table

CHECK = CheckResult(
    metric="kl_k3",
    measured="kl_k3",
    pair="bf16/bf16",
    kind="max",
    limit=0.001,
    level="error",
    answer="fail",
    sentence="broken",
    value=0.0125,
    low=0.01,
    high=0.02,
    bound_level=0.05,
    p_value=0.01,
    holm_level=0.05,
    passing_limit=0.021,
    run_value=0.0125,
    baseline_value=None,
    comparison=None,
    num_sequences=100,
    num_tokens=1000,
    by="token",
    source="",
)
CHECKS = [CHECK, CHECK.model_copy(update={"level": "warn", "pair": "a|b/fp16", "low": None, "passing_limit": None})]


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_every_cell_of_a_check_is_on_the_screen_and_in_markdown(number: int) -> None:
    table = checks_table(CHECKS)
    screen = Console(file=io.StringIO(), width=200)
    print_table(screen, table)
    shown = screen.file.getvalue().splitlines()[1 + number]
    written = markdown_table(table)[2 + number]
    for cell in table.rows[number]:
        assert in_full(cell) in shown
        assert escaped_cell(cell) in written


def test_what_a_pair_is_called_makes_no_cell_of_its_own_in_markdown() -> None:
    rows = markdown_table(checks_table(CHECKS))[2:]
    cells = [row.replace("\\|", "").count("|") for row in rows]
    assert cells == [len(checks_table(CHECKS).columns) + 1] * 2
    unescaped = markdown_table(replace(checks_table(CHECKS), columns=["x"]), in_full)[3]
    assert unescaped.count("|") > cells[1]
    assert escape("a|b") in rows[1]


def test_a_value_has_the_digits_that_its_interval_gives_it_everywhere() -> None:
    """With one digit for the headline, 0.01, the two would seem to be two numbers."""
    check = CHECK.model_copy(update={"run_value": 0.0127, "run_low": 4e-4, "run_high": 0.35, "value": 0.0127})
    table = checks_table([check])
    assert table.rows[0][table.columns.index("value")] == "0.013" == write_estimate(check.run_metric).value


def default_checks(answer: str) -> list[CheckResult]:
    """Of the gate file that `init` writes, and of a preset: one pair."""
    passing_limit = None if answer == "inconclusive" else 0.00312
    values = {"value": 0.002911, "run_value": 0.002911, "low": 0.002699, "high": 0.003119, "limit": 0.1}
    interval = {"run_low": 0.002711, "run_high": 0.003112, "passing_limit": passing_limit}
    names = {"metric": "abs_logprob_diff", "measured": "abs_logprob_diff", "answer": answer}
    return [CHECK.model_copy(update=names | values | interval)]


@pytest.mark.parametrize("answer", ["pass", "fail", "inconclusive"])
def test_the_checks_of_the_default_gate_fit_80_columns_with_one_line_each(answer: str) -> None:
    out = io.StringIO()
    table = checks_table(default_checks(answer))
    print_fitting(Console(file=out, width=80, force_terminal=True, color_system=None), table)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    [row] = [line for line in lines if "bf16/bf16" in line]
    assert "abs_logprob_diff max 0.1 " in row
    assert "0.0027 to 0.0031" in row
    assert lines[-1] == row
    assert ("would" in out.getvalue()) == (answer != "inconclusive")


def test_a_limit_that_would_limit_nothing_is_no_advice_and_the_pair_of_a_log_has_one_name() -> None:
    share = CHECK.model_copy(update={"kind": "min", "limit": 0.5, "value": 0.31, "passing_limit": 6e-26})
    assert passing_text(share) == "no limit near"
    assert passing_text(share.model_copy(update={"passing_limit": 0.2})) == "0.200"
    assert pair_label(share) == "bf16/bf16"
    assert pair_label(share.model_copy(update={"pair": "log/log"})) == "log"
