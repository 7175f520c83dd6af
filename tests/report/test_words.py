"""What people read on a page: no identifiers in sentences, no numbers that say nothing."""

import html
import re

import pytest
from markupsafe import escape

from mismatch_probe.dtypes import Dtype
from mismatch_probe.notation import ABSENT, WrittenNumber
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.names import metric_aggregate, visible_sentence
from mismatch_probe.report.page import render_html
from mismatch_probe.report.sections.corrections import rule_words
from mismatch_probe.report.view import Cell, Table, absences, with_values
from tests.report import samples
from tests.report.pages import drawings, words

PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))
WHY = "fewer than 16 responses are long enough to fit a range of lengths"
LOST = dict.fromkeys(("spread_coefficient", "spread_exponent", "budget_tokens"), WHY)


def with_few_lengths(summary: Summary) -> Summary:
    """As a run of a dozen responses has it."""
    pairs = []
    for pair in summary.pairs:
        assert pair.length is not None
        law = samples.replace(pair.length, budget_tokens=None, fitted_ess=[], unavailable=LOST)
        pairs.append(pair.model_copy(update={"length": law}))
    return summary.model_copy(update={"pairs": pairs})


@pytest.mark.parametrize(
    ("name", "aggregate"),
    [
        ("abs_logprob_diff", "mean"),
        ("abs_logprob_diff_p50", "50th percentile"),
        ("abs_logprob_diff_p99_9", "99.9th percentile"),
        ("abs_logprob_diff_max", "largest"),
        ("outside_band_0.5_2", "mean"),
    ],
)
def test_a_metrics_aggregate_is_said(name: str, aggregate: str) -> None:
    assert metric_aggregate(name) == aggregate


@pytest.mark.slow
def test_no_line_ends_inside_a_number_of_a_sentence() -> None:
    summary = samples.undrawn(samples.summary(PAIRS))
    html_page = render_html(summary, samples.manifest(PAIRS))
    headline = re.search(r"<h1>(.*?)</h1>", html_page)
    assert headline is not None
    power = r"\d[\d.]*e-\d+"
    assert re.search(power, headline[1])
    assert not re.search(power, re.sub(rf'<span class="whole">{power}</span>', "", headline[1]))
    evidence = "".join(re.findall(r"<li>(token KL.*?)</li>", html_page))
    assert re.search(power, evidence)
    assert not re.search(power, re.sub(rf'<span class="whole">{power}</span>', "", evidence))


@pytest.mark.parametrize("text", ["than the baseline's 0.0022.", 'of "x" 1.', "R & 1.", "1 < 3. So", "it's 7 % of 1."])
def test_what_stands_on_one_line_is_no_part_of_an_entity(text: str) -> None:
    """A tag behind the `&` of `&#39;s 1.` would show the rest as it is written in HTML."""
    written = visible_sentence(text)
    assert html.unescape(re.sub("<.*?>", "", written)) == text
    assert re.sub("<[^>]*>", "", written) == str(escape(text))
    assert not re.search("&<|<span[^>]*>[#a-z0-9]*;", written)


@pytest.fixture(scope="module")
def page() -> str:
    return render_html(with_few_lengths(samples.summary(PAIRS)), samples.manifest(PAIRS))


@pytest.fixture(scope="module")
def text(page: str) -> str:
    """Of the page without its scripts, and without what is set as code."""
    shown = re.sub(r"<(script|style|code)\b.*?</\1>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", shown)))


def test_no_sentence_and_no_drawing_holds_an_identifier(page: str, text: str) -> None:
    before_settings = text[: text.rindex("Settings in effect on both sides")]
    identifiers = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9.]+)+\b", before_settings))
    assert identifiers <= {"e_pi", "e_mu"}
    drawn = " ".join(re.findall(r'"(?:text|hovertext)": "[^"]*"', words(drawings(page))))
    assert not re.search(r"sequence_|token_[a-z]|kl_k3|abs_logprob", drawn)


def test_no_number_says_nothing(text: str) -> None:
    assert not re.search(r"(\d\.\d*) ?\[\1, \1\]", text)
    assert not re.search(r"\b0\.\d*e-?\d", text)
    assert not re.search(r"\b\d+\^\d", text)
    assert not re.search(r"\de\d{2}\b", text)


def test_the_same_absence_of_several_pairs_stands_once(text: str) -> None:
    assert text.count(WHY) == 1
    assert f"BF16, FP16, FP32: the spread, its exponent, a fitted length budget, since {WHY}" in text


def test_nothing_absent_is_no_note() -> None:
    assert absences([("BF16", {}), ("FP16", {})]) is None


def test_a_rule_is_called_what_people_call_it() -> None:
    rules = {rule.name: rule_words(rule) for rule in samples.summary(PAIRS).pairs[0].corrections}
    assert rules["sequence_mask_3"] == "Seq-MIS at 3"
    assert rules["sequence_reject_geometric_0.999_1.001"] == "Geo-RS at 0.999 to 1.001"
    assert "_" not in "".join(rules.values())
    assert len(set(rules.values())) == len(rules)


def test_what_the_columns_at_the_top_mean_stands_under_them(text: str) -> None:
    top = text[: text.index("How far apart")]
    assert "rms pi / mu: how far the log-probs of the training path (pi) and of the engine (mu) lie" in top


def test_a_row_that_holds_nothing_is_left_out() -> None:
    rows: list[list[Cell]] = [
        ["a", ABSENT, WrittenNumber(ABSENT)],
        ["b", ABSENT, "1"],
        ["c", WrittenNumber("0"), ABSENT],
    ]
    table = with_values(Table("Found", ["name", "first", "second"], rows))
    assert [row[0] for row in table.rows] == ["b", "c"]
