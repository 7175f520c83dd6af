"""The page of a difference: what changed first, both runs in every figure, and no difference where none can be told."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from mismatch_probe.difference.runs import difference_of
from mismatch_probe.records.answers import Difference
from mismatch_probe.records.manifest import Manifest
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.answers.diff import difference_answer, render_difference
from mismatch_probe.report.screen import print_answer
from tests.report.browser import Tab, needs_browser
from tests.report.pages import drawings, traces
from tests.report.test_browser import IMAGE, PROBE
from tests.report.test_hostile import PAYLOADS
from tests.report.test_hostile_documents import assert_acts_not, attacked
from tests.simulated_run import Simulation, edit_manifest, simulated_run
from tests.warm_python import warm_python

SMALL = Simulation(num_prompts=24, mean_length=30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunDirectory]:
    folder = tmp_path_factory.mktemp("runs")
    first, second = (simulated_run(folder / name, SMALL) for name in ("before", "after"))

    def other(manifest: Manifest) -> None:
        manifest.versions["torch"] = "9.9"
        manifest.settings.engine.args["max_num_seqs"] = 3

    edit_manifest(second, other)
    return first, second


@pytest.fixture(scope="module")
def difference(runs: tuple[RunDirectory, RunDirectory]) -> Difference:
    return difference_of(*runs)


def worse(difference: Difference, low: float, value: float, high: float) -> Difference:
    """The same with another ratio of mean abs(d)."""
    raw = json.loads(difference.model_dump_json())
    raw["pairs"][0]["metrics"]["abs_logprob_diff"]["ratio"] |= {"low": low, "value": value, "high": high}
    return Difference.model_validate(raw)


def top(page: str) -> str:
    text = re.sub(r"<[^>]+>", " ", page[page.index("<header") : page.index("</header>")])
    return re.sub(r"\s+", " ", text)


@pytest.mark.slow
def test_what_changed_stands_first_and_settings_before_versions(difference: Difference) -> None:
    text = top(render_difference(difference))
    assert text.index("engine.args.max_num_seqs") < text.index("torch")
    assert "max_num_seqs settings absent 3" in text
    assert "What changed what of before after" in text


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ((1.1, 1.2, 1.3), "✕ the second is worse"),
        ((0.7, 0.8, 0.9), "✓ the second is better"),
        ((0.9, 1.2, 1.5), "? no difference can be seen"),
    ],
)
def test_the_interval_of_the_ratio_decides_what_is_said(
    difference: Difference, ratio: tuple[float, float, float], words: str
) -> None:
    text = top(render_difference(worse(difference, *ratio)))
    assert text.startswith(f" {words} Difference of two runs")
    assert ("the interval holds 1" in text) == (ratio[0] <= 1 <= ratio[2])


def test_the_number_of_settings_says_of_how_many_changes_or_that_nothing_changed(
    runs: tuple[RunDirectory, RunDirectory], difference: Difference
) -> None:
    assert "of 2 changes in all" in top(render_difference(difference))
    page = top(render_difference(difference_of(runs[0], runs[0])))
    assert "nothing changed that the manifests record" in page
    assert "of 0 changes" not in page


def test_both_runs_stand_in_the_figures_with_what_their_points_say(difference: Difference) -> None:
    found = drawings(render_difference(difference))
    lines = [trace for trace in traces(found["plot-position-1"]) if "hovertext" in trace]
    assert [trace["hovertext"][0].split("<br>")[0] for trace in lines] == ["before", "after"]
    assert {trace["legendgroup"] for trace in lines} == {"truncate-o", "mask-6-2-s"}
    [ratios] = traces(found["plot-ratios-1"], mode="markers")
    assert re.search(r"first .*<br>second .*<br>second / first ", ratios["hovertext"][0])


def test_runs_in_folders_of_one_name_are_called_first_and_second(difference: Difference) -> None:
    sides = {
        which: getattr(difference, which).model_copy(update={"run": f"{which}/run"}) for which in ("first", "second")
    }
    assert "What changed what of first second" in top(render_difference(difference.model_copy(update=sides)))


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_what_a_stranger_wrote_into_a_run_is_text(difference: Difference, payload: str) -> None:
    assert_acts_not(render_difference(attacked(difference, payload)))


@pytest.mark.slow
def test_the_command_writes_the_page_only_where_it_is_asked_for(
    runs: tuple[RunDirectory, RunDirectory], tmp_path: Path
) -> None:
    first, second = (run.path for run in runs)
    assert "Report" not in warm_python("mismatch_probe", "diff", first, second).stdout
    page = tmp_path / "diff.html"
    assert f"Report: {page}" in warm_python("mismatch_probe", "diff", first, second, "--html", page).stdout
    assert 1_000_000 < page.stat().st_size < 2_500_000


@pytest.fixture(scope="module")
def hostile_page(difference: Difference) -> str:
    return render_difference(attacked(difference, PROBE + IMAGE + "".join(PAYLOADS.values()) + "x" * 300))


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_drawn_and_runs_nothing(tab: Tab, hostile_page: str, width: int, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(hostile_page, encoding="utf-8", errors="backslashreplace")
    tab.console.clear()
    tab.open(page, width)
    tab.draw_all()
    assert tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert tab.run("document.documentElement.dataset.ran") is None
    assert tab.run("document.title") != "pwned"
    assert tab.console == []


def test_the_screen_begins_with_what_changed_in_the_numbers_and_ends_with_the_settings(difference: Difference) -> None:
    out = io.StringIO()
    print_answer(difference_answer(difference), Console(file=out, width=200, color_system=None))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("BF16: ")
    assert lines.index("changed:") > next(number for number, line in enumerate(lines) if line.startswith("metric"))


def test_runs_whose_responses_have_other_lengths_are_said_to(difference: Difference) -> None:
    assert not any("on average" in remark for remark in difference_answer(difference).remarks)
    raw = json.loads(difference.model_dump_json())
    raw["pairs"][0]["second_counts"]["num_tokens"] *= 2
    longer = Difference.model_validate(raw)
    [remark] = [remark for remark in difference_answer(longer).remarks if "on average" in remark]
    assert remark.endswith("what grows with length differs by that alone")
