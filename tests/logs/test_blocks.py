"""Responses are looked at many at once, and what is told of them is what each by itself gives."""

import numpy as np
import pytest

from mismatch_probe.logs import LogChecks, LogFinding
from mismatch_probe.logs.checks import log as checks_of_a_log
from mismatch_probe.logs.checks.columns import RESPONSES_OF_A_BLOCK
from mismatch_probe.logs.checks.log import Alignment
from mismatch_probe.records.sequences import LoggedResponse

FAULTS = ("zeros", "filled", "missing", "copied", "padding", "shifted", "single", "no column")


def response(number: int, random: np.random.Generator, fault: str) -> LoggedResponse:
    length = int(random.choice([0, 1, 3, 20, 60]))
    ids = random.integers(0, 500, length).astype(np.int32)
    log_mu = -random.exponential(1, length)
    log_pi = np.minimum(log_mu + 0.01 * random.standard_normal(length), 0.3)
    if fault == "zeros":
        log_mu = np.where(random.random(length) < 0.3, 0.0, log_mu)
    elif fault == "filled" and number % 4 == 0:
        log_mu = np.zeros(length)
    elif fault == "missing":
        log_mu = np.where(random.random(length) < 0.05, np.nan, log_mu)
        log_pi = np.where(random.random(length) < 0.02, -9999.0, log_pi)
    elif fault == "copied" and number % 5 == 0:
        log_pi = np.where(random.random(length) < 0.95, log_mu, log_pi)
    elif fault == "padding" and length > 20:
        log_mu[:10], ids[:10] = 0.0, 7
    elif fault == "shifted":
        log_pi = np.roll(log_mu, 1)
    elif fault == "single":
        log_mu = log_mu.astype(np.float32)
    has_pi = fault != "no column" or number % 3 > 0
    return LoggedResponse(
        where=f"line {number}",
        prompt_token_ids=random.integers(0, 500, number % 4).astype(np.int32),
        token_ids=ids,
        sampled=random.random(length) < 0.9,
        log_mu=log_mu,
        log_pi=log_pi if has_pi else None,
        log_ref=log_mu if number % 2 else None,
        entropy_nats=np.abs(log_mu) if number % 3 else None,
        step=number % 2 if fault in FAULTS[:4] else None,
        temperature=float(number % 2),
        num_padding=number % 2,
    )


def answers_of(responses: list[LoggedResponse]) -> tuple[list[LogFinding], dict[str, object], dict[str, object]]:
    checks = LogChecks(400)
    for each in responses:
        checks.add(each)
    copies = {name: (copies.count, copies.others) for name, copies in checks.copies().items()}
    findings = checks.findings()
    for finding in findings:
        correlations = finding.evidence.get("correlations")
        if isinstance(correlations, dict):
            correlations.update({shift: round(value, 9) for shift, value in correlations.items()})
    return findings, checks.missing_numbers(), copies


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("count", [7, 80])
def test_many_at_once_are_told_what_each_by_itself_is(fault: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        responses = [response(number, random, fault) for number in range(count)]
        responses += responses[:2]
        together = answers_of(responses)
        with monkeypatch.context() as patch:
            patch.setattr(checks_of_a_log, "RESPONSES_OF_A_BLOCK", 1)
            assert answers_of(responses) == together


@pytest.mark.slow
def test_very_many_short_responses_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """200,000 responses of a token took minutes, a hundred calls of numpy each."""
    looks = []
    monkeypatch.setattr(Alignment, "add", lambda self, block: looks.append(len(block.responses)))
    checks, one = LogChecks(), np.array([5], np.int32)
    short = LoggedResponse(
        where="line 1", prompt_token_ids=one, token_ids=one, sampled=np.array([True]), log_mu=np.array([-1.0])
    )
    for _ in range(2 * RESPONSES_OF_A_BLOCK + 5):
        checks.add(short)
    checks.findings()
    assert looks == [RESPONSES_OF_A_BLOCK, RESPONSES_OF_A_BLOCK, 5]


def test_no_response_tells_nothing() -> None:
    [counts] = LogChecks().findings()
    assert counts.evidence == {"sampled": 0, "not_sampled": 0, "padding": 0}
