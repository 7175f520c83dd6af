"""In a real browser: the page of a training run fits a phone and runs nothing."""

from pathlib import Path

import pytest

from mismatch_probe.report.training import write_training_report
from tests.report.test_browser import BROWSER, PROBE, dom, opened
from tests.report.training.training_runs import TrainingSample, firing, training_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome to open the page in"),
]


def write_page(folder: Path, hostile: str) -> Path:
    sample = TrainingSample(model=hostile, firings=(firing(3, ["rollback"], guard=hostile, sentence=hostile),))
    runs = [training_run(folder / name, sample) for name in ("one", "x" * 120)]
    path = folder / "report.html"
    write_training_report(runs, path)
    return path


def test_the_browser_runs_nothing_that_a_stranger_wrote(tmp_path: Path) -> None:
    document = dom(write_page(tmp_path, PROBE).read_text(encoding="utf-8"), tmp_path)
    assert 'data-ran="yes"' not in document
    assert document.count("<script") == 1


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_never_scrolls_sideways(width: int, tmp_path: Path) -> None:
    write_page(tmp_path, "x" * 300)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<!doctype html><body style="margin:0"><iframe id="f" src="report.html"
        style="width:{width}px;height:900px"></iframe><script>
        const frame = document.getElementById("f");
        frame.onload = () => {{
          const root = frame.contentDocument.documentElement;
          document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
        }};
        </script></body>""",
        encoding="utf-8",
    )
    assert 'data-overflow="0"' in opened(frame, "--allow-file-access-from-files", "--dump-dom")
