"""The sections of a run's page: settings, floors, the whole vocabulary, correction rules."""

import html
import re
from dataclasses import replace

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.report.page import render_html
from mismatch_probe.report.sections.corrections import STYLES, rule_words
from tests.report import samples


def test_settings_of_another_pair_are_told_where_they_are_not_those_of_the_first(page: str) -> None:
    tables = re.findall(r"<caption>([^<]*effective settings[^<]*)</caption>.*?<tbody>(.*?)</tbody>", page, re.S)
    first, *others = ((html.unescape(caption), re.findall(r"<code>(\w+)</code>", body)) for caption, body in tables)
    assert {"dtype", "rope_theta", "temperature"} <= set(first[1])
    assert others == [("FP16: effective settings that are not those of BF16", ["dtype"])]


def test_settings_that_differ_between_the_sides_are_marked(page: str) -> None:
    rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
    rope = next(row for row in rows if "<code>rope_theta</code>" in row and 'class="differs"' in row)
    assert re.findall(r'class="differs">(\d+)', rope) == ["10000", "1000000"]
    temperature = next(row for row in rows if "<code>temperature</code>" in row)
    assert "differs" not in temperature


def test_floors_stand_beside_the_blame(page: str) -> None:
    section = _section(page, "errors")
    assert "own floors" in section
    assert "the same responses alone and in their batches" in section


def test_the_whole_vocabulary_checks_every_sampled_estimator(page: str) -> None:
    section = _section(page, "vocabulary")
    assert section.count(">yes<") == 4 * len(samples.summary().pairs)
    for name in ("KL by k1", "KL by k2", "KL by k3", "total variation"):
        assert name in section
    assert "does not hold 0" not in section


def test_an_estimator_that_disagrees_is_named() -> None:
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    check = summary.pairs[0].full_vocabulary
    assert check is not None
    wrong = replace(check.estimators["kl_k3"], agrees=False)
    moved = replace(check, estimators=check.estimators | {"kl_k3": wrong})
    pair = summary.pairs[0].model_copy(update={"full_vocabulary": moved})
    section = _section(render_html(summary.model_copy(update={"pairs": [pair]}), samples.manifest()), "vocabulary")
    assert "does not hold 0" in re.sub(r"<[^>]+>", "", section)
    assert "BF16, KL by k3" in section


def test_whole_distributions_that_were_not_compared_are_told_with_the_reason() -> None:
    summary = samples.undrawn(samples.summary(((Dtype.BF16, Dtype.BF16),)))
    why = "the whole distributions are not finite at 3 of 8 positions"
    pair = summary.pairs[0].model_copy(update={"full_vocabulary": None, "metrics_unavailable": {"full_kl": why}})
    page = render_html(summary.model_copy(update={"pairs": [pair]}), samples.manifest())
    assert why in _section(page, "vocabulary")


def test_every_rule_says_what_it_leaves_and_those_that_leave_too_little_are_named(page: str) -> None:
    section = _section(page, "corrections")
    for rule in samples.summary().pairs[0].corrections:
        assert f"<code>{rule.name}</code>" in section
    section = re.sub(r"</?span[^>]*>", "", section)
    assert "BF16: less than 50 % by DeepSeek-V3.2's mask at 0.0001, advantage negative (" in section
    assert "FP32: every rule leaves at least 50 % of the whole responses." in section


def test_a_rule_that_leaves_too_little_of_first_tokens_alone_is_named_with_the_length() -> None:
    """The figure shows it, and the sentence above may not deny it."""
    summary = samples.summary(((Dtype.FP32, Dtype.FP32),))
    pair = summary.pairs[0]
    rules = [
        replace(rule, by_length=[replace(at, share_rejected=0.6) for at in rule.by_length[:1]])
        if rule.name == "sequence_reject_k1_0.0001"
        else rule
        for rule in pair.corrections
    ]
    first = next(rule for rule in rules if rule.name == "sequence_reject_k1_0.0001").by_length[0].num_tokens
    rejecting = pair.model_copy(update={"corrections": rules})
    section = _section(
        render_html(summary.model_copy(update={"pairs": [rejecting]}), samples.manifest()), "corrections"
    )
    section = re.sub(r"</?span[^>]*>", "", section)
    assert "of the whole responses; DeepSeek-V3.2's mask at 0.0001, advantage negative leaves " in section
    assert f"of the first {first} tokens" in section


def test_one_rule_of_each_kind_is_drawn_against_length_and_every_rule_is_in_the_tables_under_it(page: str) -> None:
    section = _section(page, "corrections")
    figure = section[section.index("<figure") : section.index("</figure>")]
    words_of = {rule.name: rule_words(rule) for rule in samples.summary().pairs[0].corrections}
    for name, style in STYLES.items():
        assert words_of[name] in html.unescape(figure[: figure.index("</ul>")])
        assert f"var(--fig-{style.color})" in figure
    drawing, tables = figure.split("The numbers behind it")
    assert drawing.count('<div class="plot"') == 3
    for rule in samples.summary().pairs[0].corrections:
        assert tables.count(f"<code>{rule.name}</code>") == 6


def test_no_two_rules_drawn_look_alike() -> None:
    assert len({(style.color, style.dash) for style in STYLES.values()}) == len(STYLES)
    assert len({(style.dash, style.marker) for style in STYLES.values()}) == len(STYLES)
    for rule in samples.summary(((Dtype.BF16, Dtype.BF16),)).pairs[0].corrections:
        assert rule.name not in STYLES or rule.by_length


@pytest.mark.slow
def test_rules_on_responses_too_few_to_draw_have_their_table() -> None:
    summary = samples.summary(((Dtype.BF16, Dtype.BF16),), samples.Simulation(num_responses=8))
    section = _section(render_html(summary, samples.manifest()), "corrections")
    assert "Too few responses are long enough for a drawing." in section
    assert '<div class="plot"' not in section
    assert "<code>sequence_weight</code>" in section


def _section(page: str, anchor: str) -> str:
    section = re.search(rf'<section id="{anchor}".*?</section>', page, re.DOTALL)
    assert section is not None
    return html.unescape(section[0])
