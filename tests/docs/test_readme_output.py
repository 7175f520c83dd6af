"""The output that the README shows is what the record of the real run says, number for number."""

import io
import json
import re
from pathlib import Path

from rich.console import Console

from mismatch_probe.records.summary import Summary
from mismatch_probe.report.page import answer_on_screen
from mismatch_probe.report.screen import print_answer
from tests.docs.pages import ROOT, Page


def test_every_line_of_the_shown_output_is_printed_for_the_real_run(tmp_path: Path) -> None:
    [shown] = [body for language, body in Page.read(ROOT / "README.md").blocks if language == "text"]
    printed = io.StringIO()
    summary = Summary.model_validate(json.loads((ROOT / "reports" / "real" / "smollm2.json").read_text()))
    print_answer(answer_on_screen(summary, tmp_path), Console(file=printed, width=140))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert [line for line in shown.splitlines() if line not in lines] == []
    assert len(re.findall(r"\[", shown)) > 9
