from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_probe.explain.fitting import Distribution
from mismatch_probe.explain.hypotheses import Context
from mismatch_probe.explain.judging import LoggedTokens
from mismatch_probe.explain.passes import LoadedWeights
from mismatch_probe.explain.predictions import Predictions
from mismatch_probe.explain.run import explain_with
from mismatch_probe.records.findings import Explanation, SideExplanation
from mismatch_probe.records.sequences import FloatArray, LoggedResponse, TokenSequence
from tests.explain.logs import logged, sampled, settings

Explained = Callable[..., SideExplanation]
ExplainedLog = Callable[..., Explanation]


@pytest.fixture(scope="session")
def responses(llama: Path) -> list[TokenSequence]:
    return sampled(llama)


@pytest.fixture(scope="session")
def explained_log(llama: Path, responses: list[TokenSequence]) -> Iterator[ExplainedLog]:
    """The explanation of a log of the responses by `llama`, or a copy of it; what they predict is computed once."""
    with Predictions.open(
        settings(llama),
        LoggedTokens.of(logged(responses, mu=[np.zeros(len(response.token_ids)) for response in responses])),
    ) as predictions:

        def explain_log(log: list[LoggedResponse], *, model: Path = llama, **others: Any) -> Explanation:
            return explain_with(predictions, settings(model, **others), LoggedTokens.of(log))

        yield explain_log


@pytest.fixture(scope="session")
def explained(responses: list[TokenSequence], explained_log: ExplainedLog) -> Explained:
    """The explanation of the engine's side of a log of the responses."""

    def explain_mu(columns: list[FloatArray], *, line: dict[str, Any] | None = None, **others: Any) -> SideExplanation:
        (side,) = explained_log(logged(responses, mu=columns, **(line or {})), **others).sides
        return side

    return explain_mu


@pytest.fixture
def rows_tried(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The responses that are computed behind kept keys and values, filled as that happens."""
    rows: set[int] = set()
    compute = LoadedWeights.column_with_kept_cache

    def recorded(
        weights: LoadedWeights,
        older: LoadedWeights,
        context: Context,
        ends: Mapping[int, int],
        distribution: Distribution,
    ) -> FloatArray:
        rows.update(ends)
        return compute(weights, older, context, ends, distribution)

    monkeypatch.setattr(LoadedWeights, "column_with_kept_cache", recorded)
    return rows
