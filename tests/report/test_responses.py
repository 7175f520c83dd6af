"""The worst responses as coloured text: what is shown of them, how it is linked, and how much of it."""

import re
from itertools import pairwise

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import PairSummary, ResponseTokens, Summary
from mismatch_probe.report.page import render_html
from mismatch_probe.report.sections.responses import windows, worst
from mismatch_probe.report.view import Note
from tests.report import samples

BF16: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
THREE: samples.Pairs = (*BF16, (Dtype.FP16, Dtype.FP16), (Dtype.FP32, Dtype.FP32))


def summary_with(*diffs: float | None, texts: tuple[str, ...] = ()) -> Summary:
    """One pair whose only worst response has these deviations, on tokens of log-prob -1 under mu."""
    summary = samples.undrawn(samples.summary(BF16))
    log_mu = [None if diff is None else -1.0 for diff in diffs]
    log_pi = [None if diff is None else -1.0 + diff for diff in diffs]
    response = (
        summary.pairs[0]
        .worst_responses[0]
        .model_copy(
            update={
                "sequence_id": summary.pairs[0].worst_tokens[0].sequence_id,
                "first": 10,
                "tokens": list(texts) or [f"t{number}" for number in range(len(diffs))],
                "log_pi": log_pi,
                "log_mu": log_mu,
            }
        )
    )
    worst = summary.pairs[0].worst_tokens[0].model_copy(update={"position": 12})
    return with_pair(summary, worst_responses=[response], worst_tokens=[worst])


def with_pair(summary: Summary, **changed: list[ResponseTokens] | list[object]) -> Summary:
    return summary.model_copy(update={"pairs": [summary.pairs[0].model_copy(update=changed)]})


def page_of(summary: Summary, pairs: samples.Pairs = BF16) -> str:
    return render_html(summary, samples.manifest(pairs))


def section(page: str) -> str:
    found = re.search(r'<section id="responses".*?</section>', page, re.S)
    assert found is not None
    return found[0]


def test_tokens_without_text_have_the_reason_that_is_true_of_the_run() -> None:
    summary = samples.undrawn(samples.summary(BF16))
    notes = [worst(summary, has_text=False, is_import=is_import).blocks[0] for is_import in (False, True)]
    assert [note.text.partition(",")[0] for note in notes if isinstance(note, Note)] == [
        "The checkpoint has no tokenizer",
        "The import was given no tokenizer",
    ]


def test_a_token_is_coloured_by_sign_and_size_of_its_deviation() -> None:
    shown = section(page_of(summary_with(0.009, 0.01, -0.9, None, 0.3, -2.0)))
    classes = re.findall(r'<(?:span|a)(?: id="[^"]*")?(?: class="?(\w+)"?)?[^>]*>t\d<', shown)
    assert classes == ["", "p1", "m4", "", "p4", "m5"]


def test_the_numbers_of_every_token_stand_beside_the_text() -> None:
    shown = section(page_of(summary_with(0.25, None, -1.0)))
    assert 'data-first="11"' in shown
    assert 'data-mu="-1.0000,,-1.0000"' in shown
    assert 'data-diff="0.250,,-1"' in shown


def test_a_token_among_the_worst_leads_to_its_row_and_the_row_to_it() -> None:
    page = page_of(summary_with(0.1, 0.2, -0.9))
    row = "worst-train-bf16-infer-bf16-1"
    assert re.search(rf'<a id="{row}-in-text" class="m4" href="#{row}">t2</a>', page)
    assert f'<td><a href="#{row}-in-text">13</a></td>' in page


def test_a_row_whose_token_is_not_shown_in_full_has_no_link() -> None:
    page = page_of(summary_with(0.1, 0.2))
    assert "-in-text" not in page
    assert "<td>13</td>" in page


def test_lines_of_a_response_end_where_they_do() -> None:
    shown = section(page_of(summary_with(0.0, 0.0, 0.0, texts=("a\n", "b", ":\n\n   "))))
    assert "<span>a<i>↵</i>\n</span><span>b</span>" in shown
    assert ">:<i>↵</i><i>↵</i>\n   </a>" in shown


def test_a_token_that_is_part_of_a_character_is_a_dot() -> None:
    shown = section(page_of(summary_with(0.0, 0.0, texts=("", "日"))))
    assert "<span>·</span><span>日</span>" in shown


def test_a_response_stands_under_its_prompt() -> None:
    summary = summary_with(0.1, 0.2)
    response = summary.pairs[0].worst_responses[0]
    with_prompt = with_pair(summary, worst_responses=[response.model_copy(update={"prompt": "Why <b>?"})])
    without_prompt = with_pair(summary, worst_responses=[response.model_copy(update={"prompt": None})])
    assert "<b>Prompt</b><bdi>Why &lt;b&gt;?</bdi>" in section(page_of(with_prompt))
    assert "<b>Prompt</b>" not in section(page_of(without_prompt))


@pytest.mark.slow
def test_a_pair_without_a_deviation_to_look_at_says_so() -> None:
    shown = section(page_of(samples.summary(THREE), THREE))
    assert "FP32: no token of the worst responses differs by 0.01 nats." in shown


def test_a_run_of_an_earlier_version_has_a_page_without_them() -> None:
    summary = samples.undrawn(samples.summary(BF16))
    old = summary.model_dump(mode="json")
    del old["pairs"][0]["worst_responses"]
    assert 'id="responses"' not in page_of(Summary.model_validate(old))


@pytest.mark.parametrize("num_pairs", [1, 3, 16, 60])
def test_text_is_bounded_however_many_pairs_there_are(num_pairs: int) -> None:
    pair = samples.summary(BF16).pairs[0]
    response = pair.worst_responses[0].model_copy(
        update={"tokens": ["a"] * 256, "log_pi": [-1.0] * 256, "log_mu": [-1.1] * 256}
    )
    pairs = [pair.model_copy(update={"worst_responses": [response] * 5})] * num_pairs
    summary = samples.summary(BF16).model_copy(update={"pairs": pairs})
    sizes = [sum(len(window.places) for window in windows(summary, each)) for each in pairs]
    assert min(sizes) >= 64
    assert sum(sizes) <= max(2400, 64 * num_pairs)


@pytest.mark.parametrize("worst", [0, 100, 255])
def test_what_is_shown_of_a_long_response_holds_its_worst_token(worst: int) -> None:
    summary = samples.summary(BF16)
    diffs = [1.0 if number == worst else 0.0 for number in range(256)]
    response = (
        summary.pairs[0]
        .worst_responses[0]
        .model_copy(update={"tokens": ["a"] * 256, "log_pi": [-2.0 + diff for diff in diffs], "log_mu": [-2.0] * 256})
    )
    pair: PairSummary = summary.pairs[0].model_copy(update={"worst_responses": [response]})
    [window] = windows(summary.model_copy(update={"pairs": [pair] * 40}), pair)
    assert worst in window.places
    assert len(window.places) == 64
    assert all(later == earlier + 1 for earlier, later in pairwise(window.places))


def test_short_responses_are_all_shown_within_the_same_bound() -> None:
    summary = samples.summary(BF16)
    response = (
        summary.pairs[0]
        .worst_responses[0]
        .model_copy(update={"tokens": ["a"] * 32, "log_pi": [-1.0] * 32, "log_mu": [-1.1] * 32})
    )
    pair = summary.pairs[0].model_copy(update={"worst_responses": [response] * 5})
    assert len(windows(summary.model_copy(update={"pairs": [pair] * 11}), pair)) == 5
