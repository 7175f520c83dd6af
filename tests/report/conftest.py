"""The page of the sample run, drawn once for all tests of a process."""

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import render_html
from tests.report import samples


@pytest.fixture(scope="session")
def page() -> str:
    return render_html(samples.summary(), samples.manifest())


@pytest.fixture(scope="session")
def drawn_page() -> str:
    pairs: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))
    return render_html(samples.summary(pairs), samples.manifest(pairs))
