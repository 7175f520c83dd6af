"""The page of the sample run, drawn once for all tests of a process."""

import pytest

from mismatch_probe.report.page import render_html
from tests.report import samples


@pytest.fixture(scope="session")
def page() -> str:
    return render_html(samples.summary(), samples.manifest())
