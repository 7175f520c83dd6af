"""The page of a log: no empty sections, details on request, no figures of broken data."""

from pathlib import Path

import numpy as np
import pytest

from mismatch_probe.errors import ExitCode
from mismatch_probe.report.answers.compare import summary_of_run
from mismatch_probe.report.page import run_answer
from mismatch_probe.report.view import Answer, Figure, Note, Table
from tests.importing.imported import imported
from tests.importing.logs import row, rows, write
from tests.logs.turns import Render, conversation, without_thinking

pytestmark = pytest.mark.slow


def page(folder: Path, lines: list[dict[str, object]], code: ExitCode = ExitCode.PASS) -> Answer:
    run = imported(folder, write(folder / "log.jsonl", lines), code=code)
    return run_answer(run.read_summary(), run.read_manifest())


def test_a_log_has_no_section_that_is_empty(tmp_path: Path) -> None:
    answer = page(tmp_path, rows())
    anchors = [section.anchor for section in answer.sections]
    assert not {"vocabulary", "errors", "experts"} & set(anchors)
    assert {"verdicts", "length", "log", "settings"} <= set(anchors)
    for section in answer.sections:
        assert not all(isinstance(block, Note) for block in section.blocks), section.anchor


def advice_of(folder: Path, lines: list[dict[str, object]]) -> list[str]:
    run = imported(folder, write(folder / "log.jsonl", lines))
    return list(summary_of_run(run.read_summary(), run.path, ()).verdict.advice)


def test_a_warning_on_a_log_stands_with_the_answer(tmp_path: Path) -> None:
    """Each kind once: that the same row is there twice does not show in any number."""
    lines = rows()
    (tmp_path / "sound").mkdir()
    assert not any("The log has a warning" in line for line in advice_of(tmp_path / "sound", lines))
    (tmp_path / "copied").mkdir()
    warned = advice_of(tmp_path / "copied", [*lines, *lines[:6]])
    [warning] = [line for line in warned if "The log has a warning" in line]
    assert warning.startswith("The log has a warning (duplicates): 6 of ")


def test_a_log_with_a_reference_says_which_side_errs(tmp_path: Path) -> None:
    lines = [row(number) for number in range(24)]
    for line in lines:
        line["ref_logprobs"] = [value - 0.001 for value in line["logprobs"]]
    words = ("--ref-is-fp32", "--train-dtype", "bf16", "--infer-dtype", "bf16")
    run = imported(tmp_path, write(tmp_path / "log.jsonl", lines), *words)
    answer = run_answer(run.read_summary(), run.read_manifest())
    assert "errors" in [section.anchor for section in answer.sections]


def test_what_the_answer_does_not_lead_to_opens_on_request(tmp_path: Path) -> None:
    answer = page(tmp_path, rows())
    assert answer.badge.kind == "undecided"
    opened = [section.anchor for section in answer.sections if not section.is_folded]
    assert opened == ["verdicts", "log", "reproduce"]


def test_the_tokens_that_a_bug_is_seen_in_stay_open(tmp_path: Path) -> None:
    """Both sides' rows are exchanged."""
    lines = rows()
    for line in lines:
        line["train_logprobs"] = (2.0 * np.asarray(line["logprobs"])).tolist()
    answer = page(tmp_path, lines)
    assert answer.badge.kind == "bug"
    assert "worst" in [section.anchor for section in answer.sections if not section.is_folded]


def test_broken_data_has_no_figures(tmp_path: Path) -> None:
    lines = rows()
    for line in lines:
        line["train_logprobs"] = [-value for value in line["train_logprobs"]]
    answer = page(tmp_path, lines, ExitCode.ENVIRONMENT)
    assert answer.badge.kind == "broken"
    assert answer.figure is None
    assert not any("of up to 0 tokens" in fact for fact in answer.facts)
    blocks = [block for section in answer.sections for block in section.blocks]
    assert not any(isinstance(block, Figure) for block in blocks)
    assert "dtypes" not in [section.anchor for section in answer.sections]


@pytest.mark.parametrize("render", [None, without_thinking], ids=["clean", "dropped"])
def test_turns_that_break_the_prefix_stand_on_the_page(tmp_path: Path, render: Render | None) -> None:
    lines = [
        row(number, tokens=len(completion), prompt_token_ids=prompt, token_ids=completion, trajectory=number)
        for number in range(4)
        for prompt, completion in conversation(number, render)
    ]
    [log] = [section for section in page(tmp_path, lines).sections if section.anchor == "log"]
    tables = {block.caption: block for block in log.blocks if isinstance(block, Table)}
    assert ("Where turns first break" in tables) == (render is not None)
    assert tables["Turns"].rows[2][1] == ("0 (0 %)" if render is None else "12 (100 %)")
