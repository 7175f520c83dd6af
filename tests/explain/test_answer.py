"""What `explain` prints of the hypotheses that it tried."""

from mismatch_probe.records.findings import Departure, Explanation, SideExplanation, Trial
from mismatch_probe.report.answers.explain import explain_answer
from tests.report.test_answer_of_findings import HOT, explanation


def test_a_hypothesis_that_leaves_more_than_is_declared_explains_nothing() -> None:
    found: Explanation = explanation(HOT)
    trials = [trial(0.97), trial(-1.0), trial(0.0)]
    sides: list[SideExplanation] = [side.model_copy(update={"trials": trials}) for side in found.sides]
    answer = explain_answer(found.model_copy(update={"sides": sides}))
    [table, *_] = [part for part in answer.screen if getattr(part, "caption", "").startswith("Tried on the engine")]
    assert [row[1] for row in table.rows] == ["97 %", "nothing", "nothing"]  # type: ignore[union-attr]


def trial(explained: float) -> Trial:
    departures = [Departure(part="distribution", code="temperature", what="temperature 1.3")]
    return Trial(
        departures=departures, explained=explained, residual_floors=2.0, residual_nats=1e-3, standard_scores=0.0
    )
