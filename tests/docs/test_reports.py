"""What is committed under reports/ names no folder of the machine that made it."""

import re

import pytest

from tests.docs.pages import ROOT

OF_A_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|Users|tmp)/\w+")


@pytest.mark.slow
def test_no_report_names_a_folder_of_the_machine_that_made_it() -> None:
    named = {
        str(path.relative_to(ROOT)): seen[0]
        for path in (ROOT / "reports").rglob("*")
        if path.is_file() and (seen := OF_A_MACHINE.search(path.read_text(encoding="utf-8")))
    }
    assert named == {}


def test_a_folder_of_a_machine_is_seen() -> None:
    assert OF_A_MACHINE.search("compare --resume --out /home/someone/runs/demo --gate gate.toml")
    assert not OF_A_MACHINE.search("see reports/demo/work/report.html and https://example.org/home/page")
