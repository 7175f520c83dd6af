"""The verdicts of a page: equal ones are one, and nothing of a pair is lost."""

import re

import pytest
from markupsafe import Markup

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import PairSummary, Summary, Verdict
from mismatch_probe.report.names import pair_label
from mismatch_probe.report.page import render_html
from mismatch_probe.report.sections.verdicts import verdicts
from mismatch_probe.report.view import Badge, Finding
from tests.report import samples

PAIRS: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))


def judged(*of_pairs: Verdict) -> Summary:
    summary = samples.undrawn(samples.summary(PAIRS))
    pairs = [
        pair.model_copy(update={"verdict": verdict}) for pair, verdict in zip(summary.pairs, of_pairs, strict=True)
    ]
    return summary.model_copy(update={"pairs": pairs, "verdict": of_pairs[0]})


def verdict(kind: str, code: str, sentence: str, *advice: str, evidence: str = "seen") -> Verdict:
    return Verdict.model_validate(
        {"kind": kind, "code": code, "sentence": sentence, "evidence": [evidence], "advice": list(advice)}
    )


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("undecided", "unexplained", "undecided"),
        ("bug", "unexplained", "bug: unexplained"),
        ("bug", "label_offset", "bug: label offset"),
        ("clean", "clean", "clean"),
    ],
)
def test_a_badge_says_one_state_once(kind: str, code: str, words: str) -> None:
    assert Badge.of(verdict(kind, code, "So.")).words == words


def findings(summary: Summary) -> list[Finding]:
    return [block for block in verdicts(summary).blocks if isinstance(block, Finding)]


def words(finding: Finding) -> str:
    items = [f"{heading}: {item}" for heading, list_ in finding.lists for item in list_]
    return "\n".join(Markup(item).striptags() for item in items)


BF16 = verdict("precision", "precision", "Precision: KL 1e-4.", evidence="of BF16")
FP16 = verdict("precision", "precision", "Precision: KL 1e-6.", evidence="of FP16")
FP32 = verdict("clean", "clean", "Clean: 1e-8.", evidence="of FP32")


def test_pairs_of_one_verdict_are_one_that_opens_to_each() -> None:
    rounding, exact = findings(judged(BF16, FP16, FP32))
    assert (rounding.label, rounding.badge.words, rounding.is_folded) == ("BF16 and FP16", "precision", True)
    assert rounding.sentence == "Rounding is all that is left in BF16 and FP16."
    assert words(rounding).splitlines() == [
        "BF16: Precision: KL 1e-4.",
        "BF16: of BF16",
        "FP16: Precision: KL 1e-6.",
        "FP16: of FP16",
    ]
    assert (exact.label, exact.badge.words, exact.is_folded) == ("FP32", "clean", True)
    [both_clean] = findings(judged(FP32, FP32, FP32))
    assert both_clean.badge.words == "clean"
    assert both_clean.sentence == "The two sides agree in BF16, FP16 and FP32."


def test_a_group_has_the_word_that_each_of_its_pairs_has() -> None:
    routing = verdict("precision", "routing", "Experts differ.")
    for summary in (judged(BF16, FP16, FP32), judged(routing, FP16, FP32), judged(routing, routing, FP32)):
        of_label = {label: finding for finding in findings(summary) for label in names_of(finding)}
        for pair in summary.pairs:
            assert of_label[pair_label(pair)].badge == Badge.of_pair(pair)


def names_of(finding: Finding) -> list[str]:
    return re.split(", | and ", finding.label)


def test_a_pair_alone_is_told_as_it_is() -> None:
    bug = verdict("bug", "positions", "Positions differ.")
    first, second = findings(judged(bug, bug, FP32))
    assert (second.label, second.badge.words, second.sentence) == ("FP32", "clean", "Clean: 1e-8.")
    assert first.label == "BF16 and FP16"


def test_bugs_in_the_same_words_are_one_and_what_differs_is_told_of_each() -> None:
    bug = verdict("bug", "positions", "Positions differ.")
    finding = findings(judged(bug, bug.model_copy(update={"also": []}), FP32))[0]
    assert finding.badge.words == "bug: positions"
    assert words(finding).count("Evidence: seen") == 1
    headings = [heading for heading, _ in finding.lists]
    assert headings[0] == "Evidence"
    assert set(headings[1:]) == {"BF16", "FP16"}


def test_bugs_in_other_words_stay_apart() -> None:
    one, other = (verdict("bug", "positions", f"Positions differ {place}.") for place in ("here", "there"))
    assert [finding.label for finding in findings(judged(one, other, FP32))] == ["BF16", "FP16", "FP32"]


def test_many_pairs_are_counted_in_the_heading_and_named_in_the_sentence() -> None:
    summary = judged(BF16, BF16, BF16)
    pairs = [pair.model_copy(update={"infer": f"side-{n}"}) for n, pair in enumerate([*summary.pairs, *summary.pairs])]
    [finding] = findings(summary.model_copy(update={"pairs": pairs}))
    assert finding.label.endswith(" and 3 more")
    assert all(f"side-{number}" in finding.sentence for number in range(6))


def test_advice_that_stands_above_is_not_repeated_but_for_another_command() -> None:
    three_verdicts = [
        verdict("undecided", "unexplained", f"Open {n}.", f"FP32 decides: `mismatch-probe {n}`") for n in range(3)
    ]
    summary = judged(*three_verdicts)
    bug = summary.verdict.model_copy(update={"advice": ["Fix it."]})
    once = [block.lists for block in findings(summary.model_copy(update={"verdict": bug}))]
    assert str(once).count("FP32 decides") == 1
    advice = [
        [str(item) for heading, items in finding.lists if heading == "Advice" for item in items]
        for finding in findings(judged(*three_verdicts))
    ]
    assert advice == [[], ["For this pair: `mismatch-probe 1`"], ["For this pair: `mismatch-probe 2`"]]


@pytest.mark.slow
@pytest.mark.parametrize("pair", samples.summary(PAIRS).pairs, ids=lambda pair: pair.infer)
def test_every_pairs_evidence_is_on_the_page(pair: PairSummary) -> None:
    summary = samples.undrawn(samples.summary(PAIRS))
    text = re.sub(r"<[^>]+>", "", render_html(summary, samples.manifest(PAIRS)))
    assert all(evidence in text for evidence in pair.verdict.evidence)


def test_a_log_alone_is_not_told_that_fp32_decides() -> None:
    summary = judged(BF16, FP16, FP32)
    assert verdicts(summary).lede.startswith("FP32 against FP32 decides")
    pairs = [summary.pairs[0].model_copy(update={"is_logged": True}), *summary.pairs[1:]]
    assert verdicts(summary.model_copy(update={"pairs": pairs})).lede.startswith("A log alone")
