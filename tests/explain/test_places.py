"""A side that lies apart from the checkpoint at places of the context is named by it, and a side that rounds is not."""

from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context, checkpoint_alone
from mismatch_probe.explain.judging import Floats, Judge, LoggedTokens
from mismatch_probe.explain.predictions import floors_of_formats
from mismatch_probe.explain.search import SideBench, search
from mismatch_probe.explain.sentences import verdict_of
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.records.summary import Verdict
from mismatch_probe.stats.rounding import Floor
from tests.explain.logs import logged
from tests.explain.test_search import KnownPredictions

ROUNDING, TOKENS = 0.02, 80
"""Nats by which an unsure token is off."""
LENGTHS = [60 + 7 * (row % 4) for row in range(16)]
PLACES = np.concatenate([length + np.arange(TOKENS) for length in LENGTHS])
AT_PLACES = (Code.PERIOD, Code.ONSET)


def verdict(
    times: Floats, seed: int, side: Any = "pi", lengths: list[int] = LENGTHS, num_prompts: int = len(LENGTHS)
) -> Verdict:
    """On a side that is off by rounding, and by so many times as much [T]; no hypothesis is tried."""
    random = np.random.default_rng(seed)
    exact = -random.exponential(1.5, PLACES.size)
    errors, others = ROUNDING * (1 - np.exp(exact)) * random.normal(size=(2, PLACES.size))
    prompts = [random.integers(0, 99, length).tolist() for length in lengths[:num_prompts]]
    sequences = [TokenSequence(str(row), prompts[row % num_prompts], [1] * TOKENS) for row in range(len(lengths))]
    column, everywhere = exact + times * errors, np.ones(PLACES.size, dtype=np.bool_)
    tokens = LoggedTokens.of(logged(sequences, mu=list(column.reshape(-1, TOKENS))))
    predictions: Any = KnownPredictions({"as logged": exact}, {"as logged": others})
    bench = SideBench(
        side=side,
        judge=Judge(column, np.zeros(PLACES.size), tokens.rows, everywhere),
        as_declared=Distribution(temperature=1.0),
        dtype=Dtype.BF16,
        floors=floors_of_formats({Dtype.BF16: Floor.measure(others, exact, everywhere)}),
        errors={},
        predictions=predictions,
        tokens=tokens,
        weights=checkpoint_alone(len(LENGTHS)),
        context=Context.as_logged(tokens),
        tell=lambda text, seconds_left: None,
    )
    return verdict_of(bench, search(bench, []), 0, PLACES.size)


@pytest.mark.parametrize(("side", "who"), [("pi", "The training path's side (pi)"), ("mu", "The engine's side (mu)")])
@pytest.mark.parametrize("times", [5.0, 100.0])
def test_a_period_is_named_with_its_places_and_its_side(times: float, side: str, who: str) -> None:
    answer = verdict(np.where(PLACES % 16 == 5, times, 1.0), 0, side)
    assert (answer.kind, answer.code) == ("bug", Code.PERIOD)
    assert answer.sentence.startswith(f"{who} errs once in every 16 places of the context, at 5")
    assert "leaves 5 when divided by 16" in answer.evidence[0]
    assert answer.evidence[-1].startswith("as declared: ")
    assert answer.also == []
    assert answer.advice == [Code.PERIOD.entry.in_a_log]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("times", [5.0, 100.0])
def test_a_step_is_named_with_its_place(times: float, seed: int) -> None:
    answer = verdict(np.where(PLACES >= 110, times, 1.0), seed)
    assert (answer.kind, answer.code) == ("bug", Code.ONSET)
    named = int(answer.sentence.split("departs from place ")[1].split()[0])
    assert abs(named - 110) <= 3


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["alike", "grows", "heavy tails"])
def test_a_side_that_rounds_has_no_place(kind: str, seed: int) -> None:
    times = {
        "alike": np.ones(PLACES.size),
        "grows": 1 + 2 * (PLACES - PLACES.min()) / np.ptp(PLACES),
        "heavy tails": np.abs(np.random.default_rng(seed).standard_t(3, PLACES.size)),
    }[kind]
    assert verdict(times, seed).code not in AT_PLACES


def test_a_side_that_is_off_throughout_is_unexplained() -> None:
    assert verdict(np.full(PLACES.size, 30.0), 0).code == Code.UNEXPLAINED


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_there", [PLACES >= 110, PLACES % 16 == 5], ids=["from a place on", "once in every block"])
def test_a_side_that_is_off_elsewhere_too_is_unexplained(is_there: np.ndarray, seed: int) -> None:
    """Other weights were sought there, whatever they do at some places."""
    answer = verdict(np.where(is_there, 150.0, 30.0), seed)
    assert answer.code == Code.UNEXPLAINED
    assert any("--weights" in line for line in answer.advice)


@pytest.mark.parametrize("seed", range(3))
def test_a_side_that_does_not_agree_with_itself_from_a_place_on_is_called_so(seed: int) -> None:
    """Four prompts with four responses each, of the same tokens: what differs there is no window."""
    assert verdict(np.where(PLACES >= 110, 100.0, 1.0), seed, num_prompts=4).code == Code.NOT_REPEATABLE


@pytest.mark.parametrize("seed", range(3))
def test_behind_prompts_of_one_length_a_place_may_be_one_of_the_response(seed: int) -> None:
    """Rows of a table have a period, and nobody errs; a step is named, and may be either."""
    own, lengths = np.tile(np.arange(TOKENS), len(LENGTHS)), [60] * len(LENGTHS)
    assert verdict(np.where(own % 16 == 3, 4.0, 1.0), seed, lengths=lengths).code == Code.AS_DECLARED
    step = verdict(np.where(own >= 40, 10.0, 1.0), seed, lengths=lengths)
    assert step.code == Code.ONSET
    assert "every prompt has 60 tokens: it may be a place of the response" in step.evidence
    others = verdict(np.where(PLACES >= 110, 10.0, 1.0), seed)
    assert not any("every prompt has" in line for line in others.evidence)


@pytest.mark.parametrize("seed", range(3))
def test_behind_prompts_of_one_length_the_last_places_take_fivefold(seed: int) -> None:
    """Half of what a log alone takes."""
    own, lengths = np.tile(np.arange(TOKENS), len(LENGTHS)), [60] * len(LENGTHS)
    assert verdict(np.where(own >= TOKENS - 8, 4.0, 1.0), seed, lengths=lengths).code == Code.AS_DECLARED
    assert verdict(np.where(own >= TOKENS - 8, 8.0, 1.0), seed, lengths=lengths).code == Code.ONSET


@pytest.mark.parametrize("seed", range(3))
def test_behind_prompts_of_one_length_a_large_period_is_a_question_with_its_places(seed: int) -> None:
    """One of the first eight tokens is far off: that is no other text before the response."""
    own, lengths = np.tile(np.arange(TOKENS), len(LENGTHS)), [60] * len(LENGTHS)
    answer = verdict(np.where(own % 16 == 3, 100.0, 1.0), seed, lengths=lengths)
    assert (answer.kind, answer.code) == ("undecided", Code.UNEXPLAINED)
    assert any("leaves 15 when divided by 16" in line for line in answer.evidence)
    assert "every prompt has 60 tokens: it may be a place of the response" in answer.evidence
    assert not any("other text before" in line for line in answer.evidence)


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_that_are_off_are_other_text_behind_prompts_of_one_length_too(seed: int) -> None:
    own = np.tile(np.arange(TOKENS), len(LENGTHS))
    answer = verdict(np.where(own < 8, 300.0, 30.0), seed, lengths=[60] * len(LENGTHS))
    assert answer.code == Code.UNEXPLAINED
    assert any("it looks like other text before the response" in line for line in answer.evidence)
    assert not any("divided by" in line for line in answer.evidence)
