"""What a model or a stranger wrote is shown, and does nothing."""

import json
from html.parser import HTMLParser

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.inert import cut_text
from mismatch_probe.report.names import visible
from mismatch_probe.report.page import render_html
from mismatch_probe.report.rendering import packed_json, unpack
from tests.report import samples
from tests.report.pages import SCRIPTS, drawings, words

PAYLOADS = {
    "script": "<script>document.title='pwned'</script>",
    "closing script": "</script><script>document.title='pwned'</script>",
    "closing style": "</style><img src=x onerror=alert(1)>",
    "comment": "<!--<script>--><svg/onload=alert(1)>",
    "attribute": '" onmouseover="alert(1)" x="',
    "single quotes": "' onfocus='alert(1)' autofocus='",
    "template": "{{ 7 * 7 }}{% for x in y %}",
    "url": "javascript:alert(1)",
    "line separator": "\u2028alert(1)\u2029",
    "bidi override": "\u202ecod.exe\u202c\u2066",
    "terminal escape": "\x1b]0;pwned\x07\x1b[2J",
    "null and replacement": "\x00\ufffd\ufeff",
    "entity": "&lt;script&gt;&#60;b&#62;",
    "cdata": "]]><![CDATA[<script>alert(1)</script>",
    "lone surrogate": "\ud800",
    "formula": "$\\frac$ $x_ \\$",
    "many marks": "a" + "\u0335" * 200,
}

ALLOWED_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "a", "div", "nav", "p", "ol", "ul", "li", "main", "header"),
    *("section", "footer", "h1", "h2", "h3", "h4", "table", "caption", "thead", "tbody", "tr", "th", "td", "figure"),
    *("figcaption", "details", "summary", "span", "code", "pre", "b", "i", "small", "mark", "bdi", "script"),
    *("svg", "path", "button", "noscript", "dl", "dt", "dd"),
}


class Inspector(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append(dict(attrs).get("type"))


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_hostile_text_anywhere_in_the_records_stays_inert(payload: str) -> None:
    pairs: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
    simulation = samples.Simulation(num_responses=16, longest=64, hostile=payload, model=f"demo{payload}")
    page = render_html(samples.summary(pairs, simulation), samples.manifest(pairs, payload))
    inspector = Inspector()
    inspector.feed(page)
    inspector.close()
    assert set(inspector.tags) <= ALLOWED_TAGS
    assert inspector.scripts == list(SCRIPTS.values())
    assert not set("<>") & set(words(drawings(page)).replace("<br>", "").replace("<extra></extra>", ""))
    assert not [name for name, _ in inspector.attributes if name.startswith("on")]
    assert not [value for name, value in inspector.attributes if name in ("href", "src") and not value.startswith("#")]
    assert not [character for character in "\u202e\u2066\u2028\u2029\x1b\x00\ufeff" if character in page]


def test_text_that_is_not_escaped_would_be_noticed() -> None:
    inspector = Inspector()
    inspector.feed(f"<p>{PAYLOADS['closing style']}{PAYLOADS['script']}</p>")
    assert "img" in inspector.tags
    assert inspector.scripts == [None]
    assert "onerror" in dict(inspector.attributes)


def test_what_cannot_be_seen_is_named() -> None:
    assert visible("a\u202eb\n\u2028") == "a<i>RLO</i>b<i>↵</i><i>U+2028</i>"


def test_marks_piled_on_a_letter_cannot_paint_over_other_lines() -> None:
    assert len(visible(PAYLOADS["many marks"])) < 5


def test_what_is_packed_survives_and_holds_no_markup() -> None:
    document = {"text": "".join(PAYLOADS.values())}
    text = packed_json(document)
    assert json.loads(unpack(text)) == document
    assert text.isascii()
    assert not set("<\"'/") & set(text)


def test_text_is_cut_from_the_side_asked_for() -> None:
    assert cut_text("abcdef", 3, keep="end") == "…def"
    assert cut_text("abcdef", 3, keep="start") == "abc…"
    assert cut_text("abc", 3, keep="start") == "abc"
