"""In a real browser: model output that tries to run does not, and the page fits a phone."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import render_html
from tests.report import samples
from tests.report.test_hostile import PAYLOADS

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))
MOST_SHEETS = 14
PROBE = "<script>document.documentElement.dataset.ran = 'yes'</script>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome to open the page in"),
]


def opened(path: Path, *flags: str) -> str:
    """What the browser says of a file after everything that runs has run."""
    assert BROWSER is not None
    common = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=3000"),
    ]
    command = [BROWSER, *common, *flags, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def dom(page: str, folder: Path) -> str:
    """The document as the browser has it."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return opened(path, "--window-size=1280,2000", "--dump-dom")


def hostile_page(payload: str) -> str:
    simulation = samples.Simulation(num_responses=16, longest=64, hostile=payload)
    return render_html(samples.summary(PAIRS, simulation), samples.manifest(PAIRS, payload))


def test_the_browser_runs_nothing_that_a_model_wrote(tmp_path: Path) -> None:
    page = hostile_page(PROBE + "".join(PAYLOADS.values()))
    document = dom(page, tmp_path)
    assert 'data-ran="yes"' not in document
    assert "<title>pwned" not in document
    assert document.count("<script") == 1


def test_the_policy_alone_stops_a_script_that_slipped_through(tmp_path: Path) -> None:
    page = hostile_page("").replace("</main>", f"{PROBE}<img src=x onerror=\"document.title='pwned'\"></main>")
    document = dom(page, tmp_path)
    assert 'data-ran="yes"' not in document
    assert "<title>pwned" not in document


def test_without_policy_and_escaping_the_probe_would_have_run(tmp_path: Path) -> None:
    assert 'data-ran="yes"' in dom(f"<!doctype html><body>{PROBE}</body>", tmp_path)


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_never_scrolls_sideways(width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(hostile_page("x" * 300), encoding="utf-8")
    frame = f"""<!doctype html><body style="margin:0"><iframe id="f" src="report.html"
      style="width:{width}px;height:900px"></iframe><script>
    const frame = document.getElementById("f");
    frame.onload = () => {{
      const root = frame.contentDocument.documentElement;
      document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
    }};
    </script></body>"""
    path = tmp_path / "frame.html"
    path.write_text(frame, encoding="utf-8")
    assert 'data-overflow="0"' in opened(path, "--allow-file-access-from-files", "--dump-dom")


def test_the_page_prints_on_few_sheets(tmp_path: Path) -> None:
    path, printed = tmp_path / "report.html", tmp_path / "report.pdf"
    path.write_text(render_html(samples.summary(PAIRS), samples.manifest(PAIRS)), encoding="utf-8")
    opened(path, f"--print-to-pdf={printed}")
    assert 1 < printed.read_bytes().count(b"/Type /Page\n") <= MOST_SHEETS
