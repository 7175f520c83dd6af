"""The page: whole, deterministic, offline, small, and usable without a mouse or colours."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import render_html, run_answer, write_report
from mismatch_probe.report.rendering import PlotlyJs, render_page
from mismatch_probe.report.view import Answer
from tests.report import samples
from tests.report.pages import SCRIPTS, drawings, embedded, scripts_of, traces, words

MOST_BYTES = 2_520_000
"""plotly.js takes 1.84 MB of it."""
VOID = {"meta", "br", "img", "hr", "link", "input", "wbr"}
SECTIONS = (
    *("answer", "verdicts", "dtypes", "scatter", "length", "errors", "vocabulary", "confidence", "corrections"),
    *("worst", "counts", "settings", "provenance", "reproduce"),
)


class Structure(HTMLParser):
    """Checks that tags close in order; collects ids, links and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        for name in ("href", "aria-labelledby", "aria-describedby"):
            self.links += [part.removeprefix("#") for part in str(found.get(name) or "").split()]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def test_intervals_are_said_to_be_clustered_as_they_are(page: str) -> None:
    assert "clustered by prompt" in page
    assert "clustered by response" not in page


@pytest.fixture(scope="module")
def structure(page: str) -> Structure:
    return parsed(page)


def parsed(page: str) -> Structure:
    found = Structure()
    found.feed(page)
    found.close()
    return found


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(page: str) -> None:
    assert render_html(samples.summary(), samples.manifest()) == page


def test_every_tag_is_closed_and_every_id_is_unique(structure: Structure) -> None:
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))


def test_every_link_and_label_leads_somewhere(structure: Structure) -> None:
    assert set(structure.links) <= set(structure.ids)


def test_anchors_are_stable(structure: Structure) -> None:
    assert set(SECTIONS) <= set(structure.ids)
    assert {"figure-overview", "figure-length", "worst-train-bf16-infer-bf16", "summary"} <= set(structure.ids)


def test_nothing_is_loaded_and_nothing_runs_but_the_page_and_plotly(page: str, structure: Structure) -> None:
    assert scripts_of(page) == SCRIPTS
    assert not [tag for tag, _ in structure.elements if tag in ("img", "iframe", "link", "object", "embed")]
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    plotly, own = (digest(script) for script in (get_plotlyjs(), re.findall(r"<script>(.*?)</script>", page, re.S)[0]))
    assert policy_of(structure) == (
        f"default-src 'none'; script-src '{own}' '{plotly}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("plotly_js", list(PlotlyJs))
def test_a_page_without_a_drawing_has_nothing_to_draw_with(plotly_js: PlotlyJs) -> None:
    page = render_page(undrawn(), plotly_js, document={}, tool_version="", sources=[])
    structure = parsed(page)
    own = digest(re.findall(r"<script>(.*?)</script>", page, re.S)[0])
    assert f"script-src '{own}'; style-src" in policy_of(structure)
    assert "summary" in structure.ids
    assert not {"figures", "plotlyjs"} & set(structure.ids)
    assert "http" not in page.replace("http-equiv", "")
    assert "drawn by JavaScript" not in page
    assert len(page) < 60_000


def undrawn() -> Answer:
    return replace(run_answer(samples.undrawn(samples.summary()), samples.manifest()), figure=None, sections=[])


@pytest.mark.slow
def test_a_page_for_a_repository_fetches_one_checked_version_of_plotly_and_is_small() -> None:
    page = render_html(samples.summary(), samples.manifest(), plotly_js=PlotlyJs.CDN)
    url = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
    tag = f'<script src="{url}" integrity="{digest(get_plotlyjs())}" crossorigin="anonymous"></script>'
    assert tag in page
    assert re.findall(r"https?://[^\"' ;]+", page) == [url, url]
    assert f" {url}; style-src" in policy_of(parsed(page))
    assert len(page) < 700_000


def digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def policy_of(structure: Structure) -> str:
    policies = [a["content"] for _, a in structure.elements if a.get("http-equiv") == "Content-Security-Policy"]
    [policy] = policies
    assert policy is not None
    return policy


def test_every_drawing_can_be_heard_and_every_header_has_a_scope(structure: Structure) -> None:
    plots = [a for _, a in structure.elements if a.get("class") == "plot"]
    assert len(plots) > 10
    assert all(plot.get("aria-labelledby") and plot.get("aria-describedby") for plot in plots)
    assert all(a.get("scope") in ("row", "col") for tag, a in structure.elements if tag == "th")
    assert ("a", {"class": "skip", "href": "#answer"}) in structure.elements


def test_every_drawing_takes_its_colours_from_the_page(page: str) -> None:
    drawn = words(drawings(page))
    assert "var(--fig-" in drawn
    assert not re.search(r"#[0-9a-f]{6}\b|rgb", drawn)
    assert '"family"' not in drawn
    used = set(re.findall(r"var\((--[\w-]+)\)", page + drawn))
    assert used <= set(re.findall(r"(--[\w-]+):", page))


def test_every_drawing_has_its_specification_and_its_place(page: str, structure: Structure) -> None:
    panels = [a["id"] for _, a in structure.elements if a.get("class") == "panel"]
    assert list(drawings(page)) == panels


def test_whoever_hides_a_pair_hides_it_wherever_it_is_drawn(page: str) -> None:
    groups = set(re.findall(r'data-group="([^"]+)"', page))
    drawn = drawings(page)
    named = {trace.get("legendgroup") for drawing in drawn.values() for trace in drawing["data"]} - {None}
    assert groups <= named
    assert len([anchor for anchor, drawing in drawn.items() if traces(drawing, legendgroup="bf16-o")]) >= 8


def test_every_figure_tells_how_to_read_it_and_has_its_numbers(page: str) -> None:
    figures = re.findall(r'<figure id="([\w-]+)".*?</figure>', page, re.DOTALL)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    assert len(figures) == len(captions) >= 6
    assert all(caption.startswith("How to read it: ") for caption in captions)
    bodies = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    without_table = [name for name, body in zip(figures, bodies, strict=True) if "<table" not in body]
    assert without_table == []


def test_the_page_of_three_dtypes_is_small(page: str) -> None:
    assert len(page.encode()) <= MOST_BYTES


def test_the_summary_is_embedded(page: str) -> None:
    assert embedded(page)["pairs"][0]["metrics"]["kl_k3"]["value"] == pytest.approx(
        samples.summary().pairs[0].metrics["kl_k3"].value, rel=1e-8
    )


@pytest.mark.slow
def test_a_pair_of_two_dtypes_is_named_by_both() -> None:
    pairs: samples.Pairs = ((Dtype.FP32, Dtype.BF16), (Dtype.BF16, Dtype.BF16))
    page = render_html(samples.undrawn(samples.summary(pairs)), samples.manifest(pairs))
    assert "train FP32 / infer BF16" in page


def test_a_command_in_an_advice_is_set_as_code_and_hostile_text_in_it_stays_text() -> None:
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    advice = ["See: `mismatch-probe headroom --run RUN`", "Run it: `<script>`", "`<script>` is text"]
    page = render_html(
        summary.model_copy(update={"verdict": summary.verdict.model_copy(update={"advice": advice})}),
        samples.manifest(((Dtype.BF16, Dtype.BF16),)),
    )
    command = "".join(f"<span>{word}</span> " for word in ("mismatch-probe", "headroom", "--run", "RUN"))
    assert f"<li>See: <code>{command.strip()}</code></li>" in page
    assert "<li>Run it: <code><span>&lt;script&gt;</span></code></li>" in page
    assert "<li><code><span>&lt;script&gt;</span></code> is text</li>" in page


@pytest.mark.slow
def test_the_page_of_the_largest_run_stays_small() -> None:
    pairs: samples.Pairs = tuple((train, infer) for train in Dtype for infer in Dtype)
    summary = samples.summary(pairs, samples.Simulation(num_responses=24, longest=32_768))
    assert sum(pair.counts.num_tokens for pair in summary.pairs) > 2_000_000
    assert len(render_html(summary, samples.manifest(pairs)).encode()) <= MOST_BYTES


@pytest.mark.slow
def test_endless_text_of_a_model_makes_no_large_page() -> None:
    hostile = "\u202e</script><script>" * 100
    pairs: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))
    summary = samples.summary(pairs, samples.Simulation(hostile=hostile))
    assert len(render_html(summary, samples.manifest(pairs, hostile)).encode()) <= MOST_BYTES


@pytest.mark.slow
def test_a_report_is_written_from_the_records_alone(tmp_path: Path, page: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir(parents=True)
    run.write_summary(samples.summary())
    run.write_manifest(samples.manifest())
    assert write_report(run) == run.report_path
    assert run.report_path.read_text(encoding="utf-8") == page


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report(RunDirectory(tmp_path))
    RunDirectory(tmp_path).write_manifest(samples.manifest())
    with pytest.raises(RunDirectoryError, match=r"summary\.json does not exist"):
        write_report(RunDirectory(tmp_path))
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(BrokenRecord, match=r"summary\.json cannot be read"):
        write_report(RunDirectory(tmp_path))


@pytest.mark.slow
def test_where_to_look_and_what_else_was_seen_are_set_and_not_spelt_out() -> None:
    page = render_html(samples.summary(simulation=samples.Simulation(bug_nats=2.0)), samples.manifest())
    assert '<li><a href="#length">Along the response</a>: ' in page
    assert "<li><code>one_sided_dtype</code>: " in page
    assert "&lt;a href" not in page
    assert "&lt;code" not in page


@pytest.mark.slow
def test_what_was_also_seen_is_told_in_whole_sentences() -> None:
    bug = samples.Simulation(num_responses=16, longest=64, bug_nats=2.0)
    text = re.sub(r"<[^>]+>", "", render_html(samples.summary(simulation=bug), samples.manifest()))
    assert "errs more. Evidence: 92 % of it is its own; rms error 0.01 for pi. Give both sides" in text


def test_no_line_break_cuts_a_number_behind_its_minus(page: str) -> None:
    assert "<td><b>-" in page
    assert not re.search(r"<td>-?\d[\d.]*e-\d+</td>", page)


@pytest.mark.slow
def test_parts_that_could_not_be_had_are_told_in_words() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    bare = summary.pairs[0].model_copy(
        update={"length": None, "blame": None, "scatter": None, "confidence": [], "errors": [], "worst_tokens": []}
    )
    page = render_html(summary.model_copy(update={"pairs": [bare]}), samples.manifest())
    for sentence in ("no length law", "No reference was scored", "no probabilities to draw", "no token deviates"):
        assert sentence in page
    assert parsed(page).open == []


@pytest.mark.slow
def test_a_run_without_one_usable_token_still_has_a_page() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),))
    empty = summary.pairs[0].model_copy(
        update={
            "metrics": {},
            "length": None,
            "blame": None,
            "scatter": None,
            "confidence": [],
            "errors": [],
            "worst_tokens": [],
        }
    )
    page = render_html(summary.model_copy(update={"pairs": [empty], "contrasts": []}), samples.manifest())
    assert parsed(page).open == []
