"""Which hypothesis is accepted, on predictions and rounding whose law is known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mismatch_probe.causes.comparison import Code
from mismatch_probe.dtypes import Dtype
from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context, Family, Option, Setup, checkpoint_alone, departure
from mismatch_probe.explain.judging import Floats, Judge, LoggedTokens
from mismatch_probe.explain.predictions import PassClock, floors_of_formats
from mismatch_probe.explain.search import SideBench, search
from mismatch_probe.records.sequences import TokenSequence
from mismatch_probe.stats.rounding import Floor
from tests.explain.logs import logged

ROWS, LENGTH, UNIT = 20, 30, 0.02
NUM_TOKENS = ROWS * LENGTH
DECLARED = Distribution(temperature=1.0)
EVERYWHERE = np.ones(NUM_TOKENS, dtype=np.bool_)


@dataclass
class KnownPredictions:
    """Exact log-probs [T] and the format's errors [T], each by the name of a context."""

    exact: dict[str, Floats]
    errors: dict[str, Floats]
    clock: PassClock = field(default_factory=PassClock)

    def tokens_to_pass(self, hypotheses: Sequence[Sequence[Setup]]) -> list[int]:
        return [0] * len(hypotheses)

    def column(self, setup: Setup, distribution: Distribution) -> Floats:
        return self.exact[setup.context.name]

    def in_format(self, dtype: Dtype, context: Context, distribution: Distribution) -> Floats:
        return self.exact[context.name] + self.errors[context.name]


def named_of(errors_times: float, residual_times: float) -> str:
    """What is said of a column whose prompts had no first token, where the format errs by so many UNITs, and the column
    is so many off; `as logged` errors are one UNIT.
    """
    random = np.random.default_rng(0)
    as_logged = -random.exponential(2.0, NUM_TOKENS)
    exact = {"as logged": as_logged, "without BOS": as_logged - np.abs(random.normal(0, 4.0, NUM_TOKENS))}
    noise = random.normal(0, UNIT, (3, NUM_TOKENS))
    errors = {"as logged": noise[0], "without BOS": errors_times * noise[1]}
    column = exact["without BOS"] + residual_times * noise[2]
    tokens = LoggedTokens.of(
        logged(
            [TokenSequence(str(row), [row, 1], [0] * LENGTH) for row in range(ROWS)],
            mu=list(column.reshape(ROWS, LENGTH)),
        )
    )
    context = Context.as_logged(tokens)
    predictions: Any = KnownPredictions(exact, errors)
    bench = SideBench(
        side="mu",
        judge=Judge(column, np.zeros(NUM_TOKENS), tokens.rows, EVERYWHERE),
        as_declared=DECLARED,
        dtype=Dtype.BF16,
        floors=floors_of_formats({Dtype.BF16: Floor.measure(errors["as logged"], as_logged, EVERYWHERE)}),
        errors={},
        predictions=predictions,
        tokens=tokens,
        weights=checkpoint_alone(ROWS),
        context=context,
        tell=lambda text, seconds_left: None,
    )
    what = departure("context", Code.PROMPT_PREFIX, "a prompt without BOS")
    option = Option(what, context=Context.of("without BOS", [[1]] * ROWS))
    explained_by = search(bench, [Family("BOS missing", "context", (option,))]).explained_by
    return "" if explained_by is None else explained_by.trial.departures[0].what


@pytest.mark.parametrize("times", [1.0, 3.5, 10.0])
def test_a_context_is_judged_by_the_rounding_in_it(times: float) -> None:
    """BF16 errs 3.5 times as far in Gemma 3 without its first token as with it."""
    assert named_of(errors_times=times, residual_times=times) == "a prompt without BOS"


def test_a_context_that_leaves_more_than_the_rounding_in_it_explains_nothing() -> None:
    assert named_of(errors_times=1.0, residual_times=3.5) == ""
    assert named_of(errors_times=3.5, residual_times=12.0) == ""
