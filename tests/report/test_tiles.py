"""The three large numbers at the top of a page: of the worst pair, against what is published and what is there."""

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.records.summary import Summary
from mismatch_probe.report.sections.overview import overview
from mismatch_probe.report.tiles import tiles
from tests.report import samples

PAIRS: samples.Pairs = ((Dtype.FP16, Dtype.FP16), (Dtype.BF16, Dtype.BF16), (Dtype.FP32, Dtype.FP32))


@pytest.fixture(scope="module")
def summary() -> Summary:
    return samples.undrawn(samples.summary(PAIRS))


@pytest.fixture(scope="module")
def drawn() -> Summary:
    return samples.summary(PAIRS)


def with_kl(summary: Summary, kl: float) -> Summary:
    """Of the pair of BF16."""
    pairs = [
        pair.model_copy(update={"metrics": pair.metrics | {"kl_k3": samples.replace(pair.metrics["kl_k3"], value=kl)}})
        if pair.infer == "bf16"
        else pair
        for pair in summary.pairs
    ]
    return summary.model_copy(update={"pairs": pairs})


def test_the_worst_pair_is_set_against_the_published_limit(summary: Summary) -> None:
    size = tiles(with_kl(summary, 2.5e-4))[0]
    assert size.label == "BF16: KL per token"
    assert size.note == "25 % of NeMo-RL's limit (0.001)"


def test_beyond_the_limit_it_is_so_many_times_the_limit(summary: Summary) -> None:
    assert tiles(with_kl(summary, 0.012))[0].note == "12 times NeMo-RL's limit (0.001)"
    assert tiles(with_kl(summary, 48.81))[0].note == "48,800 times NeMo-RL's limit (0.001)"


def test_the_length_budget_is_set_against_the_responses_of_the_run(drawn: Summary) -> None:
    [pair] = [pair for pair in drawn.pairs if pair.infer == "bf16"]
    assert pair.length is not None
    assert pair.length.budget_tokens is not None
    times = pair.length.budget_tokens.value / pair.length.median_response
    [length] = [tile for tile in tiles(drawn) if tile.label == "Length budget at ESS 0.5"]
    assert float(length.note.split(" times")[0]) == pytest.approx(times, rel=0.05)


def test_how_often_the_budget_holds_the_median_response_is_no_more_exact_than_the_budget(drawn: Summary) -> None:
    pairs = []
    for pair in drawn.pairs:
        assert pair.length is not None
        law = samples.replace(
            pair.length,
            median_response=15.0,
            budget_tokens=samples.replace(pair.metrics["kl_k3"], value=4155.0, low=1000.0, high=9000.0),
        )
        pairs.append(pair.model_copy(update={"length": law}))
    [length] = [tile for tile in tiles(drawn.model_copy(update={"pairs": pairs})) if "budget" in tile.label]
    assert length.note == "280 times the median response here, 15 tokens"


def test_a_closer_dtype_is_named_only_where_it_surely_is_closer(drawn: Summary) -> None:
    [closer] = [tile for tile in tiles(drawn) if tile.label == "Closest dtype in this run"]
    assert closer.value == "FP16"
    unsure = [
        contrast.model_copy(update={"ratio": samples.replace(contrast.ratio, low=0.9)}) for contrast in drawn.contrasts
    ]
    assert "Closest dtype in this run" not in [
        tile.label for tile in tiles(drawn.model_copy(update={"contrasts": unsure}))
    ]


@pytest.mark.parametrize("kind", ["bug", "broken", "clean"])
def test_where_the_numbers_measure_no_precision_there_are_no_tiles_and_the_page_says_why(
    kind: str, summary: Summary
) -> None:
    verdict = summary.verdict.model_copy(update={"kind": kind, "sentence": "Another answer."})
    pairs = [pair.model_copy(update={"verdict": verdict}) for pair in summary.pairs]
    other = summary.model_copy(update={"verdict": verdict, "pairs": pairs})
    assert tiles(other) == []
    assert overview(other, samples.manifest(PAIRS)).headline.lower().endswith("another answer.")


def test_the_page_does_not_say_no_bug_while_another_pair_is_undecided(summary: Summary) -> None:
    """The pair of the largest KL is told by precision, another one by nothing."""
    open_question = summary.verdict.model_copy(
        update={"kind": "undecided", "code": "unexplained", "sentence": "It may be a bug."}
    )
    pairs = [
        pair.model_copy(update={"verdict": open_question}) if pair.infer == "fp16" else pair for pair in summary.pairs
    ]
    other = with_kl(summary.model_copy(update={"pairs": pairs, "verdict": open_question}), 0.5)
    assert overview(other, samples.manifest(PAIRS)).headline.startswith("Undecided: FP16 differs ")


def test_the_page_opens_with_whether_it_is_a_bug(summary: Summary) -> None:
    assert overview(with_kl(summary, 2.5e-4), samples.manifest(PAIRS)).headline.startswith(
        "No bug. BF16 rounding costs KL 2.50e-4 a token, 25 % of NeMo-RL's limit"
    )
