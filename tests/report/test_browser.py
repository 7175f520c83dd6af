"""In a real browser: drawings are drawn and answer, what a model wrote does nothing, and the page fits a phone."""

import base64
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import render_html
from mismatch_probe.report.rendering import PlotlyJs
from tests.report import samples
from tests.report.browser import Tab, needs_browser, shown
from tests.report.test_hostile import PAYLOADS

PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16))
PROBE = "<script>document.documentElement.dataset.ran = 'yes'</script>"
IMAGE = "<img src=x onerror=\"document.documentElement.dataset.ran = 'yes'\">"

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def without_drawings(drawn_page: str) -> str:
    """Nothing is drawn that the test does not look at."""
    return drawn_page.replace('<div class="plot"', "<div")


@pytest.fixture(scope="module")
def report(tab: Tab, drawn_page: str, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    shown(tab, drawn_page, tmp_path_factory.mktemp("report"))
    tab.draw_all()
    return tab


@pytest.fixture(scope="module")
def hostile(tab: Tab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of what attacks and of what cannot be broken into lines, its drawings drawn in the widest window."""
    payload = f"<b>bold</b>{PROBE}{IMAGE}{''.join(PAYLOADS.values())}{'x' * 300}"
    simulation = samples.Simulation(num_responses=16, longest=64, hostile=payload)
    page = render_html(samples.summary(PAIRS, simulation), samples.manifest(PAIRS, payload))
    folder = tmp_path_factory.mktemp("hostile")
    shown(tab, page, folder).draw_all()
    return folder / "page.html"


def plot(anchor: str) -> str:
    return f"document.querySelector('#{anchor} .drawing')"


def axis(tab: Tab, anchor: str) -> Any:
    return tab.run(f"JSON.stringify({plot(anchor)}.layout.yaxis.range)")


def test_every_drawing_is_drawn_and_the_browser_complains_of_nothing(report: Tab) -> None:
    assert report.run("document.querySelectorAll('.plot').length") > 10
    assert report.run("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))")
    assert report.console == []


UNPACKED_HERE = """
(() => {
  const element = document.body.appendChild(document.createElement("script"));
  Object.assign(element, { type: "text/plain", id: "packed-by-a-test", textContent: %s });
  try {
    return unpacked("packed-by-a-test");
  } catch (error) {
    return error.message;
  } finally {
    element.remove();
  }
})()
"""


def unpacked_there(tab: Tab, compressed: bytes) -> Any:
    packed = base64.b85encode(compressed).decode().replace("<", ",")
    return tab.run(UNPACKED_HERE % json.dumps(packed))


def test_what_is_packed_is_unpacked_by_the_page(report: Tab) -> None:
    """Blocks that are stored, those of fixed codes and those that bring their own."""
    noise = "".join(map(chr, random.Random(0).choices(range(32, 1000), k=20_000)))
    for text in ("", "a", "abc" * 50_000, "é€😀" * 999, noise):
        for level in (0, 1, 9):
            assert unpacked_there(report, gzip.compress(text.encode(), level, mtime=0)) == text


def test_what_is_packed_and_damaged_is_an_error_and_no_endless_loop(report: Tab) -> None:
    intact = gzip.compress(b"what is packed " * 99, mtime=0)
    length = intact[-4:]
    for damaged in (b"A" * 60, intact[:10] + b"\xff" * 20 + length, intact[:10] + bytes(9) + length):
        assert unpacked_there(report, damaged) == "what is packed in the page is damaged"


def test_ticks_between_powers_of_ten_are_whole_numbers(report: Tab) -> None:
    """20 and 50, not 2 and 5 beside 100."""
    ticks = report.run("[...document.querySelectorAll('#corrections .xtick text')].map((tick) => tick.textContent)")
    assert ticks
    assert all(float(tick) >= 10 for tick in ticks), ticks


def test_a_point_that_is_pointed_at_says_its_value_interval_and_counts(report: Tab) -> None:
    drawing = plot("overview-kl")
    report.run(f"{drawing}.scrollIntoView({{block: 'center'}})")
    text = report.run(f"{drawing}.data.find((trace) => trace.hovertext).hovertext[1]")
    place = f"{drawing}.querySelectorAll('.scatterlayer .trace .points path')[1].getBoundingClientRect()"
    x, y = (report.run(f"{place}.{side} + {place}.{size} / 2") for side, size in (("x", "width"), ("y", "height")))
    report.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 3, y=y)
    report.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    report.wait(f"{drawing}.querySelector('.hovertext')")
    label = report.run(f"{drawing}.querySelector('.hovertext').textContent")
    assert label == text.replace("<br>", "")
    assert "BF16" in label
    assert " responses, " in label


def test_the_key_hides_a_pair_in_every_drawing_and_shows_it_again(report: Tab) -> None:
    visible = f"{plot('length-position')}.data.filter((trace) => trace.visible !== false).length"
    before = report.run(visible)
    key = "document.querySelector('#figure-overview .key button')"
    report.run(f"{key}.click()")
    report.wait(f"{visible} < {before}")
    other = "document.querySelector('#figure-length .key button')"
    assert report.run(f"{other}.getAttribute('aria-pressed')") == "false"
    report.run(f"{other}.click()")
    report.wait(f"{visible} === {before}")


def test_a_hidden_pair_takes_its_label_and_its_part_of_the_scale_with_it(report: Tab) -> None:
    drawing, key = plot("overview-kl"), "[...document.querySelectorAll('#figure-overview .key button')].at(-1)"
    labels = (
        f"[...{drawing}.querySelectorAll('.annotation-text')].filter((each) => each.textContent.startsWith('FP32'))"
    )
    spans = f"{drawing}.layout.xaxis.range[1] - {drawing}.layout.xaxis.range[0]"
    before = report.run(spans)
    assert report.run(f"{labels}.length") == 1
    report.run(f"{key}.click()")
    report.wait(f"{labels}.length === 0")
    assert report.run(spans) < 0.7 * before
    report.run(f"{key}.click()")
    report.wait(f"{labels}.length === 1")
    assert report.run(spans) == before


def test_a_logarithmic_drawing_can_be_made_linear_and_back(report: Tab) -> None:
    kind = f"{plot('length-position')}.layout.yaxis.type"
    for wanted in ("linear", "log"):
        report.run("document.querySelector('#length-position .scale').click()")
        report.wait(f"{kind} === '{wanted}'")
        assert report.run(kind) == wanted


def test_what_a_caption_says_of_a_logarithmic_axis_goes_with_it(report: Tab) -> None:
    caption = "document.querySelector('#overview-kl .reading').innerText"
    assert "equal factors" in report.run(caption)
    report.run("document.querySelector('#overview-kl .scale').click()")
    assert "equal factors" not in report.run(caption)
    assert "The dotted line is NeMo-RL's limit" in report.run(caption)
    report.run("document.querySelector('#overview-kl .scale').click()")


def test_the_name_of_a_limit_stands_beside_its_line_on_either_axis(report: Tab) -> None:
    drawing = plot("overview-kl")
    name = f"[...{drawing}.querySelectorAll('.textpoint text')].find((text) => text.textContent.includes('limit'))"
    line = f"{drawing}.querySelector('.shapelayer path')"
    for _ in range(2):
        report.run("document.querySelector('#overview-kl .scale').click()")
        text, path = (
            report.run(f"(({{left, right}}) => [left, right])({each}.getBoundingClientRect())") for each in (name, line)
        )
        assert min(abs(end - path[0]) for end in text) < 12


def test_the_buttons_of_a_drawing_cover_no_words(report: Tab) -> None:
    """Where no pointer can hover, they are always there."""
    bottom = f"{plot('overview-kl')}.querySelector('.modebar-btn').getBoundingClientRect().bottom"
    words = f"{plot('overview-kl')}.querySelectorAll('.textpoint text, .annotation text')"
    tops = f"[...{words}].map((each) => each.getBoundingClientRect().top)"
    assert report.run(f"Math.min(...{tops}) >= {bottom}")


def test_the_buttons_of_a_drawing_are_one_stop_and_arrows_lead_through_them(report: Tab) -> None:
    buttons = f"[...{plot('length-position')}.querySelectorAll('.modebar-btn')]"
    assert report.run(f"{buttons}.filter((button) => button.tabIndex >= 0).length") == 1
    report.run(f"{buttons}[0].focus()")
    for key, number in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        report.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert report.run(f"{buttons}.indexOf(document.activeElement)") == number


def test_a_linear_axis_has_ticks_that_can_be_counted(report: Tab) -> None:
    """Steps of a power of ten, kept on a linear axis, would be a tick a token."""
    turned = "document.querySelectorAll('.scale').forEach((button) => button.click())"
    counts = "[...document.querySelectorAll('.drawing')].map((each) => each.querySelectorAll('.xtick').length)"
    report.run(turned)
    assert max(report.run(counts)) < 30
    report.run(turned)


def test_a_drawing_is_zoomed_by_dragging_and_reset_by_a_double_click(report: Tab) -> None:
    drawing = plot("length-cumulative")
    before = axis(report, "length-cumulative")
    report.run(f"{drawing}.scrollIntoView({{block: 'center'}})")
    patient = f"{{...{drawing}._context, doubleClickDelay: 10_000}}"  # milliseconds; a busy machine is slow
    report.run(f"Plotly.react({drawing}, {drawing}.data, {drawing}.layout, {patient}).then(() => null)")
    frame = f"{drawing}.querySelector('.nsewdrag').getBoundingClientRect()"
    x, y, width, height = (report.run(f"{frame}.{side}") for side in ("x", "y", "width", "height"))
    report.drag((x + 0.3 * width, y + 0.3 * height), (x + 0.6 * width, y + 0.6 * height))
    report.wait(f"JSON.stringify({drawing}.layout.yaxis.range) !== '{before}'")
    assert axis(report, "length-cumulative") != before
    report.run(f"{drawing}._mouseDownTime = 0")
    report.double_click((x + 0.5 * width, y + 0.5 * height))
    report.wait(f"JSON.stringify({drawing}.layout.yaxis.range) === '{before}'")
    assert axis(report, "length-cumulative") == before


def test_a_point_of_a_bad_token_leads_to_its_row(report: Tab) -> None:
    event = json.dumps({"points": [{"customdata": "worst-train-bf16-infer-bf16-7"}]})
    report.run(f"{plot('scatter-train-bf16-infer-bf16')}.emit('plotly_click', {event})")
    assert report.run("location.hash") == "#worst-train-bf16-infer-bf16-7"
    row = "document.getElementById('worst-train-bf16-infer-bf16-7')"
    assert report.run(f"{row}.tagName") == "TR"
    assert report.run(f"{row}.closest('details').open")


def test_colours_follow_the_theme_that_is_chosen(report: Tab) -> None:
    color = f"{plot('overview-cumulative')}.layout.template.layout.font.color"
    light = report.run(color)
    report.run("document.querySelector('.theme').click()")
    report.wait(f"{color} !== '{light}'")
    assert report.run(color) != light
    report.run("document.querySelector('.theme').click()")
    report.wait(f"{color} === '{light}'")
    assert report.run(color) == light


def test_a_table_can_be_sorted_by_a_column_of_numbers(report: Tab) -> None:
    table = "document.getElementById('worst-train-bf16-infer-bf16')"
    column = f"[...{table}.tBodies[0].rows].map((row) => Number(row.cells[2].textContent))"
    report.run(f"{table}.tHead.querySelectorAll('button')[2].click()")
    values = report.run(column)
    assert values == sorted(values)
    report.run(f"{table}.tHead.querySelectorAll('button')[2].click()")
    assert report.run(column) == values[::-1]
    assert report.run(f"{table}.tHead.rows[0].cells[2].getAttribute('aria-sort')") == "descending"


def test_a_command_of_the_advice_at_the_top_can_be_copied(tab: Tab, without_drawings: str, tmp_path: Path) -> None:
    command = "<code><span>mismatch-probe</span> <span>headroom</span></code>"
    advice, facts = f'<ul class="advice"><li>See: {command}</li><li>Wait.</li></ul>', '<ul class="facts">'
    shown(tab, without_drawings.replace(facts, advice + facts), tmp_path)
    assert tab.run("document.querySelectorAll('.advice .copy').length") == 1
    tab.run("document.querySelector('.advice .copy').click()")
    assert tab.run("getSelection().toString()") == "mismatch-probe headroom"


@pytest.mark.parametrize(
    "cells",
    [
        ["926", "13k* [3,000, 37k]", "300k† [270k, 340k]", "2.6M", "1.07T† [920B, 1.20T]", "n/a", "n/a"],
        ["0.5 s", "12.0 s", "1 min 5 s", "2 h 1 min", "n/a"],
        ["-1.2e-4 [-5e-4, 3e-4]", "\N{MINUS SIGN}1e-9", "0 (none seen)", "1e-5", "9", "10", "n/a"],
        ["< 0.01 %", "0.8 %", "54 %"],
        ["312 bytes", "9 KiB", "900 MiB", "1.5 GiB", "16.0 GiB"],
    ],
)
def test_numbers_are_sorted_by_what_they_are_worth(
    tab: Tab, without_drawings: str, cells: list[str], tmp_path: Path
) -> None:
    """What is absent comes last both ways."""
    page = without_drawings
    start, end = page.index("<tbody>"), page.index("</tbody>")
    rows = "".join(f"<tr><th>pair</th><td>{cell}</td></tr>" for cell in sorted(cells))
    shown(tab, f"{page[:start]}<tbody>{rows}{page[end:]}", tmp_path)
    heading = "document.querySelector('table').tHead.querySelectorAll('button')[1]"
    column = "[...document.querySelector('table').tBodies[0].rows].map((row) => row.cells[1].textContent)"
    absent = cells.count("n/a")
    present = cells[: len(cells) - absent]
    for wanted in (present, present[::-1]):
        tab.run(f"{heading}.click()")
        assert tab.run(column) == wanted + ["n/a"] * absent


def test_the_browser_runs_nothing_that_a_model_wrote(tab: Tab, hostile: Path) -> None:
    assert tab.run("document.documentElement.dataset.ran") is None
    assert "pwned" not in tab.run("document.title")
    assert tab.console == []


def test_what_a_model_wrote_stays_text_where_it_is_pointed_at(tab: Tab, hostile: Path) -> None:
    drawing = plot("scatter-train-bf16-infer-bf16")
    point = f"{drawing}.data.findIndex((trace) => trace.customdata)"
    tab.run(f"Plotly.Fx.hover({drawing}, [{{curveNumber: {point}, pointNumber: 0}}])")
    tab.wait(f"{drawing}.querySelector('.hovertext')")
    assert "<b>bold</b><script>" in tab.run(f"{drawing}.querySelector('.hovertext').textContent")
    assert tab.run(f"{drawing}.querySelector('.hovertext b, .hovertext script, .hovertext [style*=bold]')") is None
    assert tab.run("document.documentElement.dataset.ran") is None


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_never_scrolls_sideways(tab: Tab, hostile: Path, width: int) -> None:
    if width < 1280:
        tab.open(hostile, width)
        tab.draw_all()
    assert tab.run("document.documentElement.clientWidth") == width
    assert tab.run("document.documentElement.scrollWidth") == width


def test_the_policy_alone_stops_a_script_that_slipped_through(tab: Tab, drawn_page: str, tmp_path: Path) -> None:
    shown(tab, drawn_page.replace("</main>", f"{PROBE}{IMAGE}</main>"), tmp_path)
    assert tab.run("document.documentElement.dataset.ran") is None
    assert any("Content Security Policy" in line for line in tab.console)


def test_without_policy_and_escaping_the_probe_would_have_run(tab: Tab, tmp_path: Path) -> None:
    assert shown(tab, f"<!doctype html><body>{PROBE}</body>", tmp_path).run("document.documentElement.dataset.ran")


def test_a_page_that_names_plotlys_server_asks_for_nothing_else(tab: Tab, tmp_path: Path) -> None:
    page = render_html(samples.summary(PAIRS), samples.manifest(PAIRS), plotly_js=PlotlyJs.CDN)
    shown(tab, page, tmp_path)
    hosts = tab.run("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).host)")
    assert set(hosts) <= {"cdn.plot.ly"}


def test_the_contents_of_a_narrow_screen_scroll_without_a_bar_beside_the_button(
    tab: Tab, without_drawings: str, tmp_path: Path
) -> None:
    shown(tab, without_drawings, tmp_path, 400)
    contents, button, nav = (
        tab.run(f"(({{left, right, top, bottom}}) => [left, right, top, bottom])({each}.getBoundingClientRect())")
        for each in (
            "document.querySelector('nav ol')",
            "document.querySelector('.theme')",
            "document.querySelector('nav')",
        )
    )
    assert contents[1] <= button[0]
    assert button[1] <= nav[1]
    assert nav[2] + 4 < button[2] < button[3] < nav[3] - 4
    assert tab.run("getComputedStyle(document.querySelector('nav ol')).scrollbarWidth") == "none"


@pytest.mark.parametrize(("cell", "is_seen"), [("", False), ("1", True)])
def test_an_empty_cell_has_no_line_on_a_narrow_screen(
    tab: Tab, without_drawings: str, tmp_path: Path, cell: str, is_seen: bool
) -> None:
    head, row = "<tr><th>pair</th><th>bound</th></tr>", f"<tr><th>BF16</th><td>{cell}</td></tr>"
    table = f'<table class="stacked"><thead>{head}</thead><tbody>{row}</tbody></table>'
    shown(tab, without_drawings.replace('<ul class="facts">', f'{table}<ul class="facts">'), tmp_path, 400)
    assert tab.run("document.querySelector('table.stacked td').checkVisibility()") == is_seen


def test_no_line_of_a_command_ends_inside_a_flag_on_a_narrow_screen(
    tab: Tab, without_drawings: str, tmp_path: Path
) -> None:
    shown(tab, without_drawings, tmp_path, 400)
    lines_of_words = tab.run(
        "[...document.querySelectorAll('#reproduce pre code span')].map((word) => "
        "[word.textContent, word.getBoundingClientRect().height / parseFloat(getComputedStyle(word).lineHeight)])"
    )
    flags = [round(lines) for word, lines in lines_of_words if word.startswith("--")]
    assert len(flags) == 2
    assert set(flags) == {1}
    assert tab.run("document.querySelector('#reproduce pre code').textContent").startswith("mismatch-probe compare --")
