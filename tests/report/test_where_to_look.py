"""When two sides disagree, the report points at the place."""

import re
from dataclasses import replace

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import PairSummary
from mismatch_probe.report.names import where_to_look
from mismatch_probe.report.page import render_html
from tests.report import samples

BUG = samples.Simulation(bug_nats=2.0)


def words(pair: PairSummary) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", lead) for lead in where_to_look(pair))


def exact_pair(simulation: samples.Simulation) -> PairSummary:
    return samples.summary(((Dtype.FP32, Dtype.FP32),), simulation).pairs[0]


@pytest.mark.slow
def test_a_bug_at_the_start_is_placed_at_the_first_token_and_on_its_side() -> None:
    text = words(exact_pair(BUG))
    assert "it starts there and decays" in text
    assert "at token 1," in text
    assert "the training path (pi) errs more" in text
    assert "(token 1, d -2" in text


def test_an_even_deviation_is_not_given_a_place() -> None:
    assert "the deviation is even" in words(exact_pair(samples.Simulation()))


def test_a_deviation_that_is_small_up_to_a_place_is_not_even() -> None:
    pair = exact_pair(samples.Simulation())
    assert pair.length is not None
    first, *later = pair.length.abs_diff_by_position
    small = replace(first, mean=replace(first.mean, value=first.mean.value / 20))
    bent = replace(pair.length, abs_diff_by_position=[small, *later])
    text = words(pair.model_copy(update={"length": bent}))
    assert "the deviation is even" not in text
    assert "it is far smaller there" in text


def test_a_response_that_holds_the_worst_tokens_is_named() -> None:
    pair = exact_pair(BUG)
    mine = [token.model_copy(update={"sequence_id": "sums-3/0@infer-fp32"}) for token in pair.worst_tokens]
    assert "20 of the 20 worst tokens lie in sums-3/0@infer-fp32" in words(
        pair.model_copy(update={"worst_tokens": mine})
    )


@pytest.mark.slow
def test_only_a_verdict_of_a_bug_or_doubt_says_where_to_look() -> None:
    pairs: samples.Pairs = ((Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))
    assert "Along the response" in render_html(samples.summary(pairs, BUG), samples.manifest(pairs))
    assert "Along the response" not in render_html(samples.summary(pairs), samples.manifest(pairs))


def test_without_a_record_to_point_at_there_are_no_leads() -> None:
    bare = exact_pair(BUG).model_copy(update={"length": None, "blame": None, "worst_tokens": []})
    assert where_to_look(bare) == []
